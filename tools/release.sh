#!/usr/bin/env bash
# Collects the files of a release: programs, Debian packages and an apt repository of them, container image, chart, node image with its
# reference values, bills of materials, notes, checksums.
#
#   tools/release.sh      prints the folder target/firstlight-VERSION (RELEASE=FOLDER), from target/dist and target/deb
#   KEY=FILE              signs the checksums and the reference values with this SSH key (ssh-keygen -Y sign); the key may be in an
#                         agent or a token
#   KEY_GPG=NAME          signs the apt repository with this key of gpg, because apt knows no SSH keys
#   NODE_IMAGE=FOLDER     takes the node image from this folder of tools/mkosi.sh, in place of building it as root
#
# VERSION is the version in Cargo.toml. If the commit does not have the version's tag, +COMMIT follows it. The same commit gives the
# same bytes, except for the signatures. docs/reproduce.md
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

NAMESPACE=firstlight-release
number=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
tag=$(git describe --exact-match --tags --match 'v*' 2>/dev/null || true)
changes=$(git status --porcelain)
case $tag in
"") version=$number+$(git rev-parse --short=12 HEAD) section=Unreleased ;;
v"$number") version=$number section=$number ;;
*) die "the commit's tag is $tag, and the version in Cargo.toml is $number" ;;
esac
if [ -n "$changes" ]; then
  [ -z "$tag" ] || die "the checkout of $tag has changes: $changes"
  version=$version.changed
fi
for file in charts/firstlight/Chart.yaml packaging/changelog; do
  grep -qF "$number" "$file" || die "$file has another version than $number"
done
SOURCE_DATE_EPOCH=$(source_date)

# Makes a deterministic archive of what the arguments of tar name.
pack() { tar c --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=a+rX,u+w,go-w "$@" | gzip -9n; }

# Signs a file as `ssh-keygen -Y verify` checks it, and checks the signature.
sign() {
  rm -f "$1.sig"
  ssh-keygen -q -Y sign -f "$KEY" -n $NAMESPACE "$1" || die "ssh-keygen does not sign with $KEY"
  ssh-keygen -q -Y check-novalidate -n $NAMESPACE -s "$1.sig" <"$1" >/dev/null || die "the signature of $1 is wrong"
}

node_image=${NODE_IMAGE:-}
[ -n "$node_image" ] || node_image=$(dirname "$(tools/mkosi.sh release)")

work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
out=${RELEASE:-$ROOT/target/firstlight-$version}
rm -rf "$out"
mkdir -p "$out"
for program in unlock bootstrapper join-service key-service member-controller firstlight firstlight-volume; do
  install -m 755 "target/dist/$program" "$out/$program-linux-amd64"
done
install -m 644 target/dist/firstlight-image.tar target/deb/*.deb target/deb/*.cdx.json "$out/"
# the digest of the container image is known only now: the copies of the chart and of the documents name it, the sources cannot
digest=$(tools/image.sh --digest target/dist/firstlight-image.tar) || die "target/dist/firstlight-image.tar has no digest: run make image"
mkdir "$work/chart"
cp -r charts/firstlight "$work/chart/"
sed -i "s|^  digest: \"\"|  digest: \"$digest\"|" "$work/chart/firstlight/values.yaml"
sed -i "s|^\(\| \`image.digest\` \| \)\`\"\"\`|\1\`\"$digest\"\`|" "$work/chart/firstlight/README.md"
[ "$(cat "$work/chart/firstlight"/{values.yaml,README.md} | grep -cF "$digest")" = 2 ] || die "the chart does not take the image's digest"
# like `helm package`, but with the same bytes each time
pack -C "$work/chart" firstlight >"$out/firstlight-chart-$number.tgz"
# the section of the changelog about this version
awk -v heading="## [$section]" 'index($0, "## [") == 1 { on = index($0, heading) == 1; next } on' CHANGELOG.md >"$out/NOTES.md"
grep -q '[^[:space:]]' "$out/NOTES.md" || die "CHANGELOG.md says nothing below $section"
# the documents and the modules for OpenTofu, for readers who do not have the sources
docs=firstlight-docs-$number
mkdir "$work/$docs"
git ls-files -z -- '*.md' docs infra | grep -zv ^tests/ | xargs -0 cp --parents -t "$work/$docs"
find "$work/$docs" -type f \( -name '*.md' -o -name '*.tf' \) -print0 |
  xargs -0 sed -i "/docker:/!s|registry.example.com/firstlight:$number|&@$digest|g"
tools/options.sh target/dist >"$work/${docs}/docs/options.md"
pack -C "$work" "$docs" >"$out/$docs.tgz"

say "compressing the node image"
zstd -q -T0 -12 -o "$out/firstlight-node-image-$number.raw.zst" "$node_image/firstlight.raw"
install -m 644 "$node_image/firstlight.cdx.json" "$out/firstlight-node-image.cdx.json"
# the image is for the attestation variant of its settings: one file for each
for variant in $(sed -n 's/^attestation-variant=//p' mkosi/node.conf); do
  target/dist/firstlight measure "$node_image/firstlight.raw" --attestation-variant "$variant" --secure-boot off --units all \
    --name "firstlight-node-image-$version" >"$out/firstlight-node-image-$variant.json" 2>"$work/said" || die "$(cat "$work/said")"
done

say "making the apt repository"
mkdir "$out/apt"
ln "$out"/*.deb "$out/apt/"
(
  cd "$out/apt"
  dpkg-scanpackages --multiversion . 2>/dev/null >Packages
  gzip -9nk Packages
  {
    printf 'Origin: Firstlight\nLabel: Firstlight\nSuite: stable\nVersion: %s\nArchitectures: amd64\nDate: %s\nSHA256:\n' \
      "$number" "$(date -R -u -d "@$SOURCE_DATE_EPOCH")"
    for file in Packages Packages.gz; do printf ' %s %s %s\n' "$(sha256sum <"$file" | cut -d' ' -f1)" "$(stat -c %s "$file")" "$file"; done
  } >"$work/Release"
  mv "$work/Release" Release
  if [ -n "${KEY_GPG:-}" ]; then
    gpg --batch --quiet --local-user "$KEY_GPG" --digest-algo SHA256 --output InRelease --clearsign Release || die "gpg does not sign with $KEY_GPG"
  else
    say "the apt repository is not signed, and apt refuses it: KEY_GPG=NAME names a key of gpg"
  fi
)

cat >>"$out/NOTES.md" <<END

### Files

| file | |
|---|---|
| \`firstlight-docs-$number.tgz\` | the documents; begin with \`docs/get-started.md\`. Links of these notes are to files in it. \`infra\` in it has the modules for OpenTofu |
| \`firstlight-linux-amd64\`, \`firstlight_${number}_amd64.deb\` | the operator's command |
| \`firstlight-initramfs_${number}_amd64.deb\`, \`firstlight-node_${number}_amd64.deb\` | the packages of a node's image (\`docs/images.md\`) |
| \`firstlight-broker_${number}_amd64.deb\` | the services of a key broker without Kubernetes (\`docs/standalone.md\`) |
| \`firstlight-volume_${number}_amd64.deb\`, \`firstlight-volume-linux-amd64\` | what opens a volume of a machine without Kubernetes (\`docs/standalone.md\`) |
| \`unlock-linux-amd64\`, \`bootstrapper-linux-amd64\` | the programs in them |
| \`apt\` | the same packages as an apt repository (\`docs/images/install.md\`) |
| \`firstlight-node-image-$number.raw.zst\` | the image of a node for QEMU's machines, which needs no package (\`docs/images/mkosi.md\`) |
| \`firstlight-node-image-VARIANT.json\`, \`firstlight-node-image-VARIANT.json.sig\` | its reference values for this attestation variant, a policy, and their signature |
| \`firstlight-image.tar\` | the container image of the services, for \`firstlight apply\` and the chart (\`docs/services.md\`): \`$digest\` |
| \`join-service-linux-amd64\`, \`key-service-linux-amd64\`, \`member-controller-linux-amd64\` | the programs in it |
| \`firstlight-chart-$number.tgz\` | the Helm chart of the services, which takes only this container image |
| \`*.cdx.json\` | what each program and the node image are made of (CycloneDX); the container image has only its three programs |
| \`SHA256SUMS\`, \`SHA256SUMS.sig\` | the hashes of all files that are not signatures, and their signature |

### Check them

\`allowed_signers\` has a line \`NAME KEY\` with the publisher's public key, which does not come from the place that these files come from
(SECURITY.md in the documents):

\`\`\`sh
ssh-keygen -Y verify -f allowed_signers -I NAME -n $NAMESPACE -s SHA256SUMS.sig < SHA256SUMS
sha256sum --check --ignore-missing SHA256SUMS
\`\`\`

The same command with \`-s FILE.sig < FILE\` checks the reference values alone. What you have to do before and after an upgrade is in
\`docs/changes.md\`.

\`docs/reproduce.md\` says how to build the same bytes from the sources.
END

(
  cd "$out"
  find . -type f ! -name InRelease -printf '%P\0' | sort -z | xargs -0 sha256sum -- >"$work/SHA256SUMS"
  mv "$work/SHA256SUMS" .
  sha256sum --check --quiet SHA256SUMS
)
if [ -n "${KEY:-}" ]; then
  for file in "$out"/SHA256SUMS "$out"/firstlight-node-image-*.json; do sign "$file"; done
else
  say "SHA256SUMS and the reference values are not signed: KEY=FILE names an SSH key"
fi
say "$(find "$out" -type f | wc -l) files, $(du -sh "$out" | cut -f1)"
echo "$out"
