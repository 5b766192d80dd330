#!/usr/bin/env bash
# Collects the files of a release: programs, Debian packages, container image, chart, bills of materials, notes, checksums.
#
#   tools/release.sh      prints the folder target/firstlight-VERSION (RELEASE=FOLDER), from target/dist and target/deb
#   KEY=FILE              signs the checksums with this SSH key (ssh-keygen -Y sign); the key may be in an agent or a token
#
# VERSION is the version in Cargo.toml. If the commit does not have the version's tag, +COMMIT follows it. The same commit gives the
# same bytes, except for the signature. docs/reproduce.md
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

out=${RELEASE:-$ROOT/target/firstlight-$version}
rm -rf "$out"
mkdir -p "$out"
for program in unlock bootstrapper join-service key-service firstlight firstlight-volume; do
  install -m 755 "target/dist/$program" "$out/$program-linux-amd64"
done
install -m 644 target/dist/firstlight-image.tar target/deb/*.deb target/deb/*.cdx.json "$out/"
# like `helm package`, but with the same bytes each time
tar c --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=a+rX,u+w,go-w -C charts firstlight |
  gzip -9n >"$out/firstlight-chart-$number.tgz"
# the section of the changelog about this version
awk -v heading="## [$section]" 'index($0, "## [") == 1 { on = index($0, heading) == 1; next } on' CHANGELOG.md >"$out/NOTES.md"
grep -q '[^[:space:]]' "$out/NOTES.md" || die "CHANGELOG.md says nothing below $section"
# the documents and the modules for OpenTofu, for readers who do not have the sources
git ls-files -z -- '*.md' docs infra | grep -zv ^tests/ |
  tar cz --null --files-from=- --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=a+rX,u+w,go-w \
    --transform="s|^|firstlight-docs-$number/|" >"$out/firstlight-docs-$number.tgz"
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
| \`firstlight-image.tar\` | the container image of the services, for \`firstlight apply\` and the chart (\`docs/services.md\`) |
| \`join-service-linux-amd64\`, \`key-service-linux-amd64\` | the programs in it |
| \`firstlight-chart-$number.tgz\` | the Helm chart of the services |
| \`*.cdx.json\` | what each program is made of (CycloneDX) |
| \`SHA256SUMS\`, \`SHA256SUMS.sig\` | the hashes of all files, and their signature |

### Check them

\`allowed_signers\` has a line \`NAME KEY\` with the publisher's public key, which does not come from the place that these files come from
(SECURITY.md in the documents):

\`\`\`sh
ssh-keygen -Y verify -f allowed_signers -I NAME -n $NAMESPACE -s SHA256SUMS.sig < SHA256SUMS
sha256sum --check --ignore-missing SHA256SUMS
\`\`\`

\`docs/reproduce.md\` says how to build the same bytes from the sources.
END

(cd "$out" && sha256sum -- * >SHA256SUMS && sha256sum --check --quiet SHA256SUMS)
if [ -n "${KEY:-}" ]; then
  ssh-keygen -q -Y sign -f "$KEY" -n $NAMESPACE "$out/SHA256SUMS" || die "ssh-keygen does not sign with $KEY"
  ssh-keygen -q -Y check-novalidate -n $NAMESPACE -s "$out/SHA256SUMS.sig" <"$out/SHA256SUMS" >/dev/null || die "the signature is wrong"
else
  say "SHA256SUMS is not signed: KEY=FILE names an SSH key"
fi
say "$(find "$out" -type f | wc -l) files, $(du -sh "$out" | cut -f1)"
echo "$out"
