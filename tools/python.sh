#!/usr/bin/env bash
# Makes a Python environment with the peers of the tests: the real gRPC, the reader of Prometheus' format, and virtee's sev-snp-measure.
#
#   tools/python.sh     prints the path of its interpreter; does nothing when it is already there
#
# Needs python3 with venv and pip, and a package index that pip knows.
. "$(dirname "$0")/lib.sh"

PACKAGES="prometheus_client==0.26.0 grpcio==1.85.1 grpcio-tools==1.85.1 protobuf==7.36.2 typing_extensions==4.16.0
  sev-snp-measure==0.0.13"

recipe=$(sha256sum "$0" | cut -c1-12)
environment=$CACHE/python/$recipe
interpreter=$environment/bin/python
if [ -e "$environment/done" ]; then echo "$interpreter"; exit; fi

mkdir -p "$CACHE/python"
# two tests may ask at the same time
exec 9>"$CACHE/python/lock"; flock 9
if [ ! -e "$environment/done" ]; then
  say "installing $PACKAGES for the tests"
  rm -rf "$environment"
  python3 -m venv "$environment" >&2 || die "python3 has no venv: install python3-venv"
  # shellcheck disable=SC2086
  "$interpreter" -m pip install --quiet --disable-pip-version-check --no-deps $PACKAGES >&2
  touch "$environment/done"
fi
echo "$interpreter"
