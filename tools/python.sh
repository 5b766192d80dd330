#!/usr/bin/env bash
# Makes a Python environment with the peers of the tests: the real gRPC, the reader of Prometheus' format, virtee's sev-snp-measure, and
# moto, which has the APIs of AWS, with what it needs of EC2, Elastic Load Balancing, IAM and tags; and Azure's and
# Google's clients of their key management services and tokens; and PyKMIP's server and client; and virt-firmware, which writes variables
# into the file of a firmware.
#
#   tools/python.sh     prints the path of its interpreter; does nothing when it is already there
#
# Needs python3 with venv and pip, and a package index that pip knows.
. "$(dirname "$0")/lib.sh"

PACKAGES="prometheus_client==0.26.0 grpcio==1.85.1 grpcio-tools==1.85.1 protobuf==7.36.2 typing_extensions==4.16.0
  sev-snp-measure==0.0.13
  moto==5.2.5 boto3==1.44.5 botocore==1.44.5 jmespath==1.1.0 s3transfer==0.19.3 python-dateutil==2.9.0.post0 six==1.17.0
  urllib3==2.8.0 cryptography==50.0.2 cffi==2.1.1 pycparser==3.12 requests==2.34.2 certifi==2026.10.18 charset-normalizer==3.5.2
  idna==3.20 responses==0.26.3 PyYAML==6.0.3 Jinja2==3.1.6 MarkupSafe==3.0.4 Werkzeug==3.1.9 xmltodict==1.0.4 Flask==3.1.3
  flask-cors==6.0.5 blinker==1.9.0 click==8.5.1 itsdangerous==2.2.0
  azure-keyvault-keys==4.11.3 azure-identity==1.27.0 azure-core==1.41.0 isodate==0.7.2 msal==1.39.0 msal-extensions==1.3.1 PyJWT==2.15.1
  google-cloud-kms==3.18.0 google-api-core==2.44.0 google-auth==2.62.2 google-crc32c==1.9.0 googleapis-common-protos==1.76.0
  grpc-google-iam-v1==0.14.6 grpcio-status==1.85.1 proto-plus==1.29.0 pyasn1==0.6.5 pyasn1_modules==0.4.2 opentelemetry-api==1.45.2
  PyKMIP==0.11.0 SQLAlchemy==2.1.9 enum-compat==0.0.3
  virt-firmware==26.10 pefile==2024.8.26"

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
