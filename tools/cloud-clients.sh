#!/usr/bin/env bash
# Installs the client of a cloud for the tests of docs/clouds: `aws`, `az` or `openstack`. tests/cloud_pages/clients has the version
# and the hash of each package.
#
#   tools/cloud-clients.sh aws|azure|openstack     prints the folder of its programs; does nothing when they are already there
#
# Needs python3 with venv and pip, and a package index that pip knows.
. "$(dirname "$0")/lib.sh"

name=${1:-}
list=$ROOT/tests/cloud_pages/clients/$name.txt
[ -e "$list" ] || die "usage: tools/cloud-clients.sh aws|azure|openstack"
recipe=$(cat "$0" "$list" | sha256sum | cut -c1-12)
environment=$CACHE/cloud-clients/$name-$recipe
if [ -e "$environment/done" ]; then echo "$environment/bin"; exit; fi

mkdir -p "$CACHE/cloud-clients"
# two tests may ask at the same time
exec 9>"$CACHE/cloud-clients/lock"; flock 9
if [ ! -e "$environment/done" ]; then
  say "installing the client of $name for the tests"
  rm -rf "$CACHE/cloud-clients/$name"-*
  python3 -m venv "$environment" >&2 || die "python3 has no venv: install python3-venv"
  "$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement "$list" >&2
  touch "$environment/done"
fi
echo "$environment/bin"
