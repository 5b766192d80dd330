#!/usr/bin/env bash
# Builds AWS's cloud controller manager from the Go module proxy, and prints the path of the program or of its Helm chart. Go checks
# every module against the checksum database. If it is built already, it only prints the path.
#
#   tools/aws-controller.sh [program|chart]
. "$(dirname "$0")/lib.sh"

# the release for the Kubernetes version of tools/kubernetes.sh: the minor version is the same
VERSION=v1.34.4
MODULE=k8s.io/cloud-provider-aws

PATH=$PATH:/usr/local/go/bin
command -v go >/dev/null || die "go is missing: run tools/setup.sh"
published=$(cd / && GOWORK=off GOFLAGS='' go mod download -json "$MODULE@$VERSION" | sed -n 's/^\t"Dir": "\(.*\)".*/\1/p')
[ -n "$published" ] || die "$MODULE $VERSION cannot be downloaded from the Go module proxy"

case ${1:-program} in
chart) echo "$published/charts/aws-cloud-controller-manager"; exit ;;
program) ;;
*) die "unknown argument $1: it must be program or chart" ;;
esac

folder=$CACHE/aws-cloud-controller-manager-$VERSION
program=$folder/aws-cloud-controller-manager

if [ ! -x "$program" ]; then
  mkdir -p "$folder/source"
  exec 9>"$folder/lock"; flock 9
  say "building AWS's cloud controller manager $VERSION"
  start=$SECONDS
  cd "$folder/source"
  export CGO_ENABLED=0 GOWORK=off GOFLAGS=
  # a module of our own, because its go.mod has a `replace`. The replacement is a fork that the proxy lacks; what it replaces works too
  sed "s|^module .*|module firstlight.test/aws|" "$published/go.mod" >go.mod
  cp "$published/go.sum" go.sum
  chmod u+w go.mod go.sum
  go mod edit -require="$MODULE@$VERSION" -dropreplace=github.com/google/cel-go
  # build under another name, then rename: a file with the final name is complete
  nice -n 10 go build -mod=mod -p "${JOBS:-2}" -trimpath -buildvcs=false -ldflags "-s -w" -o "$program.new" \
    "$MODULE/cmd/aws-cloud-controller-manager" >&2 || die "AWS's cloud controller manager cannot be built"
  mv "$program.new" "$program"
  say "aws-cloud-controller-manager: $(($(stat -c %s "$program") >> 20)) MiB, $((SECONDS - start)) s"
fi
echo "$program"
