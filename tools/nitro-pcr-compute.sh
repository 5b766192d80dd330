#!/usr/bin/env bash
# Builds AWS's nitro-tpm-pcr-compute, which computes the SHA-384 PCRs of a unified kernel image as an EC2 machine with a NitroTPM has them.
#
#   tools/nitro-pcr-compute.sh     prints the path of the program; does nothing when it is already there
. "$(dirname "$0")/lib.sh"

VERSION=1.1.2
SHA256=126bc990c6d57e5671dcd57fe5c392c30a55002b8efec377fab3c7d522f54264
folder=$CACHE/nitro-pcr-compute-$VERSION
program=$folder/bin/nitro-tpm-pcr-compute
if [ -e "$program" ]; then echo "$program"; exit; fi

mkdir -p "$CACHE"
# two tests may ask at the same time
exec 9>"$CACHE/nitro-pcr-compute.lock"; flock 9
if [ ! -e "$program" ]; then
  say "building nitro-tpm-pcr-compute $VERSION"
  # build in a folder of its own, because this project's settings of Cargo are for static programs
  cd "$CACHE"
  cargo info --quiet "nitro-tpm-pcr-compute@$VERSION" >/dev/null
  crate=$(ls "${CARGO_HOME:-$HOME/.cargo}"/registry/cache/*/nitro-tpm-pcr-compute-$VERSION.crate)
  echo "$SHA256  $crate" | sha256sum --check --quiet >&2 || die "$crate is not the crate that was reviewed"
  cargo install --locked --quiet --root "$folder" "nitro-tpm-pcr-compute@$VERSION" >&2
fi
echo "$program"
