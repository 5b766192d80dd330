#!/usr/bin/env bash
# Unpacks Debian's promtool, which checks rules for Prometheus, and prints the program's path. The package is not installed, because
# that starts a Prometheus. If promtool is unpacked already, it only prints the path.
. "$(dirname "$0")/lib.sh"

folder=$CACHE/prometheus
if [ ! -x "$folder/usr/bin/promtool" ]; then
  mkdir -p "$CACHE"
  exec 9>"$folder.lock"; flock 9
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  say "fetching Debian's prometheus"
  (cd "$work" && apt-get download -qq -o APT::Sandbox::User=root prometheus) >&2 || die "prometheus cannot be fetched: run apt-get update"
  dpkg-deb -x "$work"/prometheus_*.deb "$work/tree"
  # unpack under another name, then rename: a file with the final name is complete
  rm -rf "$folder" "$folder.new"
  cp -r "$work/tree" "$folder.new"
  mv "$folder.new" "$folder"
fi
echo "$folder/usr/bin/promtool"
