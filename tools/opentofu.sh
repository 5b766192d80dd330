#!/usr/bin/env bash
# Makes what the tests of infra/ need: OpenTofu, and providers for it. Prints a folder:
#
#   bin/tofu   OpenTofu
#   plugins    a mirror for `tofu init` with the genuine providers of OpenStack and libvirt, and for AWS, Azure and Google Cloud
#              tests/tofu_schema_go, which has only the schema of a provider: the Go module proxy does not serve the genuine ones
#   schemas    the same mirror, with tests/tofu_schema_go for OpenStack too
#   bindings   archives of which tests/cloud_pages/schemas.py makes the schemas of these three
#
# OpenTofu and the genuine providers are built from the Go module proxy; Go checks every module against the checksum database.
# tests/cloud_pages/clients/tofu.txt has the version and the hash of the archives, which come from a package index that pip knows. If
# everything is there already, the script only prints the folder.
. "$(dirname "$0")/lib.sh"

TOFU=v1.12.6
# provider, version, and the module of which it is built. infra/*/versions.tf accepts these versions
PROVIDERS="
terraform-provider-openstack/openstack 3.4.0 github.com/terraform-provider-openstack/terraform-provider-openstack/v3
dmacvicar/libvirt 0.8.3 github.com/dmacvicar/terraform-provider-libvirt
hashicorp/aws 6.25.0
hashicorp/azurerm 4.55.0
hashicorp/google 6.50.0
"

PATH=$PATH:/usr/local/go/bin
command -v go >/dev/null || die "go is missing: run tools/setup.sh"
list=$ROOT/tests/cloud_pages/clients/tofu.txt
recipe=$(cat "$0" "$list" "$ROOT"/tests/tofu_schema_go/* | sha256sum | cut -c1-12)
folder=$CACHE/opentofu-$TOFU-$recipe
mkdir -p "$CACHE"
exec 9>"$CACHE/opentofu.lock"; flock 9
if [ -e "$folder/done" ]; then echo "$folder"; exit; fi
rm -rf "$CACHE"/opentofu-v*; mkdir -p "$folder"
export CGO_ENABLED=0 GOWORK=off GOFLAGS=

# Builds the program of a module, with the versions of other modules that its go.mod names.
build() { # FILE MODULE VERSION PACKAGE
  local module
  say "building $2 $3"
  module=$(go mod download -json "$2@$3" | sed -n 's/^\t"Dir": "\(.*\)",\?$/\1/p')
  [ -d "$module" ] || die "$2 $3 cannot be downloaded from the Go module proxy"
  cp -r --no-preserve=mode "$module" "$folder/source"
  (cd "$folder/source" && nice -n 10 go build -p "${JOBS:-2}" -trimpath -buildvcs=false -o "$1" \
    -ldflags "-s -w -X github.com/opentofu/opentofu/version.dev=no" "$4" >&2) || die "$2 cannot be built"
  rm -rf "$folder/source"
}

build "$folder/bin/tofu" github.com/opentofu/opentofu "$TOFU" ./cmd/tofu
(cd "$ROOT/tests/tofu_schema_go" && nice -n 10 go build -p "${JOBS:-2}" -trimpath -buildvcs=false -ldflags "-s -w" \
  -o "$folder/bin/schema" . >&2) || die "tests/tofu_schema_go cannot be built"
while read -r provider version module; do
  [ -n "$provider" ] || continue
  file=registry.opentofu.org/$provider/$version/linux_amd64/terraform-provider-${provider#*/}_v$version
  mkdir -p "$(dirname "$folder/plugins/$file")" "$(dirname "$folder/schemas/$file")"
  ln "$folder/bin/schema" "$folder/schemas/$file"
  if [ -n "$module" ]; then build "$folder/plugins/$file" "$module" "v$version" .; else ln "$folder/bin/schema" "$folder/plugins/$file"; fi
done <<<"$PROVIDERS"

say "fetching the schemas of the other providers"
python3 -m venv "$folder/venv" >&2 || die "python3 has no venv: install python3-venv"
"$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --require-hashes --requirement "$list" --dest "$folder/wheels" >&2
mkdir "$folder/bindings"
for wheel in "$folder"/wheels/*.whl; do
  name=${wheel##*_provider_}
  python3 -c 'import shutil, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
(name,) = [it for it in wheel.namelist() if it.endswith(".jsii.tgz")]
shutil.copyfileobj(wheel.open(name), open(sys.argv[2], "wb"))' "$wheel" "$folder/bindings/${name%%-*}.tgz"
done
rm -r "$folder/venv" "$folder/wheels"
touch "$folder/done"
echo "$folder"
