#!/usr/bin/env bash
# Builds flannel, a network plugin that encrypts with WireGuard, from the Go module proxy, as an add-on of the tests.
#
#   tools/flannel.sh            prints the folder: bin/flanneld, bin/flannel (the CNI plugin), bin/install-conf,
#                               bin/cnitool, and addons.yaml with flannel's own chart
#   tools/flannel.sh DEBIAN     makes the image of that add-on too: FOLDER/image.tar. DEBIAN: a root file system with nft and
#                               iptables
#
# Go checks every module against the checksum database. If everything is built already, it only prints the folder.
. "$(dirname "$0")/lib.sh"

VERSION=v0.28.10
# The last release of the CNI plugins that contains flannel's. Flannel maintains it now, but the proxy does not have that module.
PLUGINS=v1.0.0-rc1
# cnitool calls plugins as a container runtime does
CNI=v1.3.1
# Not the published image: flannel without the backends `udp`, which needs cgo, and `tencent-vpc`, whose module the proxy does not
# have.
IMAGE=firstlight.local/flannel:$VERSION

recipe=$(cat "$0" "$ROOT"/tools/{image,lib}.sh | sha256sum | cut -c1-12)
flannel=$CACHE/flannel-$VERSION-$recipe
mkdir -p "$CACHE"
exec 9>"$CACHE/flannel.lock"; flock 9

build() {
  local work=$flannel.new module
  PATH=$PATH:/usr/local/go/bin
  command -v go >/dev/null || die "go is missing: run tools/setup.sh"
  export CGO_ENABLED=0 GOWORK=off GOFLAGS=
  say "building flannel $VERSION"
  rm -rf "$CACHE"/flannel-v*; mkdir -p "$work/bin"
  module=$(go mod download -json "github.com/flannel-io/flannel@$VERSION" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
  [ -d "$module/chart/kube-flannel" ] || die "the Go module of flannel $VERSION has no chart"
  cp -r --no-preserve=mode "$module" "$work/source"
  cd "$work/source"
  sed -i '\|pkg/backend/udp"$|d; \|pkg/backend/tencentvpc"$|d' main.go
  for program in flanneld:. install-conf:./cmd/install_conf; do
    nice -n 10 go build -p "${JOBS:-2}" -trimpath -buildvcs=false -o "$work/bin/${program%:*}" \
      -ldflags "-s -w -X github.com/flannel-io/flannel/pkg/version.Version=$VERSION" "${program#*:}" >&2 || die "${program%:*} cannot be built"
  done
  for program in "github.com/containernetworking/plugins/plugins/meta/flannel@$PLUGINS" "github.com/containernetworking/cni/cnitool@$CNI"; do
    GOBIN=$work/bin nice -n 10 go install -p "${JOBS:-2}" -trimpath -ldflags "-s -w" "$program" >&2 || die "$program cannot be built"
  done
  mv chart/kube-flannel "$work/chart"
  cd "$work"; rm -rf source
  cat >addons.yaml <<YAML
addons:
- name: flannel
  namespace: kube-flannel
  chart: chart
  sha256: $(cd chart && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1)
  before-services: true
  values:
    podCidr: 10.244.0.0/16
    flannel:
      backend: wireguard
      image: {repository: ${IMAGE%:*}, tag: $VERSION}
      flannel_cni: {image: {repository: ${IMAGE%:*}, tag: $VERSION}}
YAML
  mv "$work" "$flannel"
}

# The image of flannel, and of the init container that copies the CNI plugin.
pack() {
  local debian=$1 program
  tree=$(mktemp -d); trap 'rm -rf "$tree"' EXIT
  with_netfilter "$debian" "$tree"
  for program in /usr/bin/cp /usr/bin/sh /usr/bin/sleep; do with_libraries "$debian" "$tree" "$program"; done
  install -D -t "$tree/opt/bin" "$flannel"/bin/{flanneld,install-conf}
  install "$flannel/bin/flannel" "$tree/flannel"
  mkdir -p "$tree/etc" "$tree/run" "$tree/tmp"; chmod 1777 "$tree/tmp"
  "$ROOT/tools/image.sh" "$flannel/image.tar" "$IMAGE" /opt/bin/flanneld "$tree"
}

[ -e "$flannel/addons.yaml" ] || build
if [ $# -gt 0 ] && [ ! -e "$flannel/image.tar" ]; then
  [ -d "$1/usr" ] || die "usage: tools/flannel.sh [DEBIAN-ROOT]"
  pack "$1"
fi
echo "$flannel"
