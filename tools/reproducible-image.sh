#!/usr/bin/env bash
# Builds the image of mkosi twice, the second time from a copy of the checkout in another directory, with its packages installed
# again, and compares every byte. Needs root. docs/reproduce.md
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

# Names the partitions, and the files of the root file system, that differ between two disks. A report on their contents would be too large.
explain() {
  local at tools disk start size
  at=$(cmp "$1" "$2" | sed 's/.*byte \([0-9]*\),.*/\1/')
  echo "the first difference is at byte $at; the partitions, in sectors of 512 bytes:"
  /sbin/sfdisk --dump "$1" | grep start=
  read -r start size < <(/sbin/sfdisk --json "$1" | python3 -c 'import json, sys
root = json.load(sys.stdin)["partitiontable"]["partitions"][1]
print(root["start"], root["size"])')
  tools=$(echo "$CACHE"/mkosi-tools-*)
  for disk in "$1" "$2"; do
    dd if="$disk" of="$other/erofs" bs=512 skip="$start" count="$size" status=none
    "$tools/lib64/ld-linux-x86-64.so.2" --library-path "$tools/usr/lib/x86_64-linux-gnu" "$tools/usr/bin/fsck.erofs" \
      --extract="$other/root$((++count))" --preserve "$other/erofs" >/dev/null
  done
  diff --recursive --no-dereference --brief "$other/root1" "$other/root2" | head -20
}

image=$(tools/mkosi.sh)
other=$(mktemp -d); count=0; trap 'rm -rf "$other"' EXIT
mkdir -p "$other/elsewhere/target"
git ls-files -z --cached --others --exclude-standard | tar c --null -T - --ignore-failed-read | tar x -C "$other/elsewhere"
cp -r target/dist "$other/elsewhere/target/dist"
say "building again, in $other"
# both builds share the downloads
again=$(umask 077; OUT=$other/image MKOSI_CACHE=$other/cache TZ=Asia/Tokyo "$other/elsewhere/tools/mkosi.sh")
for ending in manifest efi raw cdx.json; do
  one=${image%raw}$ending two=${again%raw}$ending
  if cmp "$one" "$two" >&2; then continue; fi
  case $ending in
  manifest | cdx.json) diff "$one" "$two" >&2 || true ;;
  raw) explain "$one" "$two" >&2 || true ;;
  esac
  die "${one##*/} differs between two builds"
done
if ! tools/image-packages.py "${image%raw}cdx.json" packaging/debian-trixie.sha256 >&2; then
  say "Debian has other packages than those in packaging/debian-trixie.sha256: images of other machines have equal bytes only with the same packages"
fi
(cd "${image%/*}" && sha256sum firstlight.{raw,efi,manifest,cdx.json})
say "two images of mkosi, built in different directories, are identical"
