#!/usr/bin/env bash
# Makes the Debian packages of the programs in target/dist: firstlight, firstlight-initramfs, firstlight-node, firstlight-broker, firstlight-volume.
#
#   tools/deb.sh      prints the folder with the packages and PROGRAM.cdx.json, the bill of materials of each program: target/deb (DEB=FOLDER)
#
# packaging/ has the files that Debian's tools read. the scripts install.sh in initramfs/ and systemd/ install the files, as on every
# other system. Nothing is compiled here, so dpkg-deb is enough, and debhelper is not needed. The bytes depend on the programs, on
# the files and on the version of dpkg-deb (SOURCE_DATE_EPOCH: the time of the commit).
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

dist=${DIST:-$ROOT/target/dist}
out=${DEB:-$ROOT/target/deb}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
head -1 packaging/changelog | grep -qF "($version)" || die "packaging/changelog does not begin with version $version"
SOURCE_DATE_EPOCH=$(source_date)
export SOURCE_DATE_EPOCH

work=$(mktemp -d); trap 'rm -rf "$work"' EXIT

stage_firstlight() {
  local tree=$1 program=$dist/firstlight
  install -D -m 755 "$program" "$tree/usr/bin/firstlight"
  "$program" man | install_page "$tree" firstlight.1
  "$program" completions bash | install -D -m 644 /dev/stdin "$tree/usr/share/bash-completion/completions/firstlight"
  "$program" completions zsh | install -D -m 644 /dev/stdin "$tree/usr/share/zsh/vendor-completions/_firstlight"
  "$program" completions fish | install -D -m 644 /dev/stdin "$tree/usr/share/fish/vendor_completions.d/firstlight.fish"
}

stage_firstlight-initramfs() {
  initramfs/install.sh "$dist/unlock" "$1"
}

stage_firstlight-node() {
  local units
  systemd/install.sh "$dist/bootstrapper" "$1"
  help_page bootstrapper | install_page "$1" bootstrapper.8
  units=$(sed -n 's/^enable //p' systemd/80-firstlight.preset | tr '\n' ' ')
  sed -i "s/UNITS/${units% }/" "$1"/DEBIAN/post{inst,rm}
}

stage_firstlight-broker() {
  systemd/broker/install.sh "$dist" "$1"
  local program
  for program in join-service key-service; do help_page "$program" | install_page "$1" "$program.8"; done
}

stage_firstlight-volume() {
  systemd/volume/install.sh "$dist/firstlight-volume" "$1"
  help_page firstlight-volume | install_page "$1" firstlight-volume.8
}

# Prints a manual page with a program's help text.
help_page() {
  LC_ALL=C date -u -d "@$SOURCE_DATE_EPOCH" '+.Dd %B %-d, %Y'
  printf '.Dt %s 8\n.Os\n.Sh NAME\n.Nm %s\n' "${1^^}" "$1"
  "$dist/$1" --help | sed -e "1s/^$1: /.Nd /; 1a.Sh DESCRIPTION\n.Bd -literal" -e '2,$s/\\/\\e/g; 2,$s/-/\\-/g; 2,$s/^[.'"'"']/\\\&&/'
  printf '.Ed\n'
}

install_page() { gzip -9n | install -D -m 644 /dev/stdin "$1/usr/share/man/man${2##*.}/$2.gz"; }

pack() { # PACKAGE PROGRAM...
  local package=$1 tree=$work/$1 program doc name
  shift
  doc=$tree/usr/share/doc/$package
  mkdir -p "$tree/DEBIAN" "$doc"
  for file in packaging/"$package"/*; do
    case $file in
    */post*) install -m 755 "$file" "$tree/DEBIAN/" ;;
    */lintian-overrides) install -D -m 644 "$file" "$tree/usr/share/lintian/overrides/$package" ;;
    *) install -m 644 "$file" "$tree/DEBIAN/" ;;
    esac
  done
  "stage_$package" "$tree"
  gzip -9n <packaging/changelog >"$doc/changelog.gz"
  install -m 644 packaging/copyright "$doc/copyright"
  for program in "$@"; do
    name=
    [ $# = 1 ] || name=$program-
    install -m 644 "$out/$program.cdx.json" "$doc/${name}sbom.cdx.json"
    tools/licenses.py "$program" | gzip -9n >"$doc/${name}third-party.gz"
  done

  (cd "$tree" && find . -type f ! -path './DEBIAN/*' -printf '%P\n' | sort | xargs -d '\n' md5sum >DEBIAN/md5sums)
  # the size in KiB; the first line of the fields is the package's name
  sed -i "s/VERSION/$version/; 1aVersion: $version\nArchitecture: amd64\nMaintainer: The Firstlight authors <firstlight@example.com>\nInstalled-Size: $(du -k --apparent-size -s "$tree/usr" | cut -f1)" "$tree/DEBIAN/control"
  # one thread: with more the bytes would depend on their number
  dpkg-deb --root-owner-group -Zxz --threads-max=1 --build "$tree" "$out/${package}_${version}_amd64.deb" >&2
}

say "packing Debian packages of version $version"
mkdir -p "$out"
for program in unlock bootstrapper join-service key-service member-controller firstlight firstlight-volume; do
  tools/sbom.py "$program" "$dist/$program" >"$out/$program.cdx.json"
done
pack firstlight firstlight
pack firstlight-initramfs unlock
pack firstlight-node bootstrapper
pack firstlight-broker join-service key-service
pack firstlight-volume firstlight-volume
echo "$out"
