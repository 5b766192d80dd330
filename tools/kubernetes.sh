#!/usr/bin/env bash
# Builds Kubernetes, and what a kubeadm cluster needs beside it, from the Go module proxy: static, stripped, with the
# version stamped in as in the released programs.
#
#   tools/kubernetes.sh [PROGRAM..]     all of them if none is named; prints the folder, PROGRAM is FOLDER/bin/PROGRAM
#
# PROGRAM is one of kubeadm, kubelet, kubectl, kube-apiserver, kube-controller-manager, kube-scheduler, kube-proxy,
# coredns, etcd, pause; or check-parameters (tests/kubernetes_go), which must be named. KUBERNETES_VERSION takes another release; etcd and
# CoreDNS follow what its kubeadm asks for. Go checks every module against the checksum database. If a program is built already, it only
# prints the folder.
. "$(dirname "$0")/lib.sh"

# what the image of mkosi has
VERSION=${KUBERNETES_VERSION:-v1.36.3}
PROGRAMS=(kubeadm kubelet kubectl kube-apiserver kube-controller-manager kube-scheduler kube-proxy coredns etcd pause)
CHECK_PARAMETERS=$ROOT/tests/kubernetes_go/main.go
# two compilers at once; the kubelet's link needs 2 GiB by itself
JOBS=${JOBS:-2}

[[ $VERSION =~ ^v1\.([0-9]+)\.([0-9]+)$ ]] || die "KUBERNETES_VERSION is $VERSION, it must look like v1.36.3"
minor=${BASH_REMATCH[1]} patch=${BASH_REMATCH[2]}
[ $# -gt 0 ] || set -- "${PROGRAMS[@]}"
prefix=$CACHE/kubernetes-$VERSION

missing=()
for program; do
  if [ "$program" = check-parameters ]; then
    # ours, which changes
    [ "$prefix/bin/$program" -nt "$CHECK_PARAMETERS" ] || missing+=("$program")
    continue
  fi
  [[ " ${PROGRAMS[*]} " == *" $program "* ]] || die "no program $program: it must be one of ${PROGRAMS[*]}"
  [ -x "$prefix/bin/$program" ] || missing+=("$program")
done
if [ ${#missing[@]} = 0 ]; then echo "$prefix"; exit; fi

mkdir -p "$prefix/bin"
exec 9>"$prefix/lock"; flock 9
command -v go >/dev/null || die "go is missing: run tools/setup.sh"
export CGO_ENABLED=0 GOOS=linux GOARCH=amd64 GOWORK=off GOFLAGS=

# A module of our own that has exactly the dependencies that a released one was made with. `replace` and `exclude` count
# only in the main module, hence the copy; and Kubernetes replaces its staging modules by folders that a published module
# lacks, but each of them is published too, as v0 with the same minor and patch.
#   adopt NAME MODULE VERSION
adopt() {
  local name=$1 module=$2 version=$3 work=$prefix/source/$1 dir
  [ ! -e "$work/done" ] || return 0
  say "fetching $module $version"
  rm -rf "$work"; mkdir -p "$work"; cd "$work"
  dir=$(go mod download -json "$module@$version" | sed -n 's/^\t"Dir": "\(.*\)".*/\1/p')
  [ -n "$dir" ] || die "$module $version is not to be had from the Go module proxy"
  sed "s|^module .*|module firstlight.test/$name|; s|=> \./staging/src/\(.*\)|=> \1 v0.$minor.$patch|" "$dir/go.mod" >go.mod
  cp "$dir/go.sum" go.sum; chmod +w go.mod go.sum
  # modules that a go.mod replaces by a folder beside it are published in the same version
  sed -i '/=> \.\.\?\//d; /^replace (\s*)$/d' go.mod
  go mod edit -require="$module@$version"
  cp "$dir/LICENSE" LICENSE 2>/dev/null || true
  : >"done"
}

# What kubeadm of this release asks for, from its sources.
wanted() {
  sed -n "s/^\t$1 = \"\(.*\)\"/\1/p" "$(go mod download -json "k8s.io/kubernetes@$VERSION" |
    sed -n 's/^\t"Dir": "\(.*\)".*/\1/p')/cmd/kubeadm/app/constants/constants.go"
}

# In the folder of `adopt`: build NAME PACKAGE [LDFLAGS]
build() {
  local name=$1 package=$2 start=$SECONDS
  say "building $name"
  # build under another name, then rename: a file in bin is complete
  nice -n 10 go build -mod=mod -p "$JOBS" -trimpath -buildvcs=false -ldflags "-s -w ${3:-}" -o "$prefix/$name.new" "$package" >&2 ||
    die "$name cannot be built"
  mv "$prefix/$name.new" "$prefix/bin/$name"
  say "$name: $(($(stat -c %s "$prefix/bin/$name") >> 20)) MiB, $((SECONDS - start)) s"
}

kubernetes() {
  adopt kubernetes k8s.io/kubernetes "$VERSION"
  cd "$prefix/source/kubernetes"
  local stamps='' package
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    stamps+=" -X $package.gitVersion=$VERSION -X $package.gitMajor=1 -X $package.gitMinor=$minor"
    stamps+=" -X $package.gitTreeState=clean -X $package.buildDate=1970-01-01T00:00:00Z"
  done
  build "$1" "${2:-k8s.io/kubernetes/cmd/$1}" "$stamps"
}

coredns() {
  local version; version=$(wanted CoreDNSVersion)
  adopt coredns github.com/coredns/coredns "$version"
  cd "$prefix/source/coredns"
  # only the plugins that kubeadm's Corefile names: the others bring the client libraries of three clouds
  {
    printf 'package main\n\nimport (\n\t"github.com/coredns/coredns/coremain"\n'
    printf '\t_ "github.com/coredns/coredns/plugin/%s"\n' cache errors forward health kubernetes loadbalance loop metrics ready reload
    printf ')\n\nfunc main() { coremain.Run() }\n'
  } >main.go
  build coredns .
}

etcd() {
  local version; version=$(wanted DefaultEtcdVersion)
  adopt etcd go.etcd.io/etcd/server/v3 "v${version%-*}"
  cd "$prefix/source/etcd"
  build etcd go.etcd.io/etcd/server/v3
}

# The process that holds a pod's namespaces: it reaps and waits to be told to end.
pause() {
  local work; work=$(mktemp -d)
  cat >"$work/pause.c" <<'C'
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int signal) { (void)signal; _exit(0); }
static void reap(int signal) { (void)signal; while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(int count, char **words) {
  // `pause -v` prints its version: kubeadm looks whether a Job with it ends before an upgrade
  (void)words;
  if (count > 1) return 0;
  struct sigaction ends = {.sa_handler = end}, reaps = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};
  sigaction(SIGINT, &ends, 0);
  sigaction(SIGTERM, &ends, 0);
  sigaction(SIGCHLD, &reaps, 0);
  for (;;) pause();
}
C
  musl-gcc -static -Os -s -o "$prefix/pause.new" "$work/pause.c" || die "pause cannot be built"
  mv "$prefix/pause.new" "$prefix/bin/pause"
  rm -rf "$work"
}

for program in "${missing[@]}"; do
  case $program in
  coredns | etcd | pause) "$program" ;;
  check-parameters) kubernetes "$program" "$CHECK_PARAMETERS" ;;
  *) kubernetes "$program" ;;
  esac
done
echo "$prefix"
