#!/usr/bin/env bash
# Builds Cluster API from the Go module proxy: its core, and the infrastructure provider of its tests, whose machines are only objects
# in the memory of the provider. Prints a folder:
#
#   core, provider             the controllers
#   core.yaml, provider.yaml   their manifests: definitions, roles, webhooks
#
# tests/cluster_api_go has the version, and the hash of each module. If everything is there already, the script only prints the folder.
. "$(dirname "$0")/lib.sh"

PATH=$PATH:/usr/local/go/bin
command -v go >/dev/null || die "go is missing: run tools/setup.sh"
module=$ROOT/tests/cluster_api_go
recipe=$(cat "$0" "$module"/go.* | sha256sum | cut -c1-12)
folder=$CACHE/cluster-api-$recipe
if [ -e "$folder/done" ]; then echo "$folder"; exit; fi
mkdir -p "$CACHE"
exec 9>"$CACHE/cluster-api.lock"; flock 9
if [ -e "$folder/done" ]; then echo "$folder"; exit; fi
rm -rf "$CACHE"/cluster-api-*; mkdir -p "$folder"

kubectl=$("$ROOT/tools/kubernetes.sh" kubectl)/bin/kubectl
export CGO_ENABLED=0 GOWORK=off GOFLAGS=
cd "$module"

# Builds the program of a package, and writes the manifests of the folder beside it.
build() { # NAME MODULE PACKAGE
  local start=$SECONDS source
  say "building $2/$3"
  nice -n 10 go build -mod=readonly -p "${JOBS:-2}" -trimpath -buildvcs=false -ldflags "-s -w" -o "$folder/$1" "$2/$3" >&2 ||
    die "$2/$3 cannot be built"
  source=$(go list -m -f '{{.Dir}}' "$2")/$3/config/default
  "$kubectl" kustomize "$source" >"$folder/$1.yaml" || die "kubectl cannot make the manifests of $source"
  say "$1: $(($(stat -c %s "$folder/$1") >> 20)) MiB, $((SECONDS - start)) s"
}

build core sigs.k8s.io/cluster-api core
build provider sigs.k8s.io/cluster-api/test infrastructure/docker
touch "$folder/done"
echo "$folder"
