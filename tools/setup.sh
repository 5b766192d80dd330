#!/usr/bin/env bash
# Makes a Debian 12 machine with rustup ready to build and test. Installs only what is missing, and says what.
. "$(dirname "$0")/lib.sh"

# what runs the tests, and what they run against
PACKAGES=(gcc libc6-dev musl-tools pkg-config make ca-certificates dpkg-dev xz-utils bzip2
  qemu-system-x86 seabios ipxe-qemu ovmf swtpm swtpm-tools busybox-static cpio kmod
  cryptsetup-bin dmsetup e2fsprogs tpm2-tools nghttp2-client nghttp2-server python3 python3-venv)

missing=()
for package in "${PACKAGES[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  say "installing Debian packages: ${missing[*]}"
  [ "$(id -u)" = 0 ] || die "installing packages needs root: apt-get install ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq >&2
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

command -v cargo >/dev/null || die "cargo is missing: install Rust with rustup (https://rustup.rs)"
if ! target_works "$MUSL"; then
  say "adding the standard library for $MUSL"
  if ! rustup target add "$MUSL" >&2 || ! target_works "$MUSL"; then
    say "NO MUSL STANDARD LIBRARY TO BE HAD: the programs are built against a static glibc instead (make build TARGET=$GNU)"
  fi
fi
for component in rustfmt clippy; do
  cargo "${component/rustfmt/fmt}" --version >/dev/null 2>&1 || rustup component add "$component" >&2
done

mkdir -p "$ROOT/.deps"
ln -sfn "$("$ROOT/tools/tss.sh" musl)" "$ROOT/.deps/musl"
