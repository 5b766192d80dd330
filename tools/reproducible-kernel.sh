#!/usr/bin/env bash
# Builds the kernel of the image of mkosi again, with another cache, and compares every byte with the one in the cache. Needs root.
# docs/reproduce.md
. "$(dirname "$0")/lib.sh"

one=$("$ROOT/tools/mkosi-kernel.sh")
other=$(mktemp -d); trap 'rm -rf --one-file-system "$other"' EXIT
two=$(umask 077; FIRSTLIGHT_CACHE=$other TZ=Asia/Tokyo "$ROOT/tools/mkosi-kernel.sh" "$(cat "$one/version")")
for file in vmlinuz config Module.symvers component.json; do
  cmp "$one/$file" "$two/$file" >&2 || die "$file differs between two builds of the kernel"
done
(cd "$one" && sha256sum vmlinuz)
say "two kernels, built in different folders, are identical"
