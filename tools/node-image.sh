#!/usr/bin/env bash
# Makes the disk of a Kubernetes node for the cluster tests, by the recipe of the real image, mkosi/: its release of Debian, packages,
# files, units and presets. In addition the disk has the folder `state` in place of the encrypted state disk, and in it containerd's
# store with each container image unpacked, so that a node needs no registry. docs/testing-kubernetes.md lists all differences.
#
#   tools/node-image.sh                prints the folder: system.img, state.img (ext4, sparse), and cni-plugins.tgz as in the system
#   tools/node-image.sh packages       prints the packages; removed: the paths that the node lacks; system ROOT: installs into a root
#                                      file system what the node has beside its packages. For tests/units.rs
#   tools/node-image.sh debian         prints the path of an archive with its packages, and with CNI plugins
#
# Needs root (mmdebstrap, and mounts in a namespace). Kept in the cache until something that it is made of changes.
. "$(dirname "$0")/lib.sh"

# Prints the values of a setting of mkosi, one a line. Usage: setting NAME FILE...
setting() {
  local name=$1; shift
  awk -v name="$name=" '
    /^[^ \t#]/ { is_it = index($0, name) == 1; $0 = is_it ? substr($0, length(name) + 1) : "" }
    is_it && NF && $1 !~ /^#/ { $1 = $1; print }' "$@"
}

mkosi=$ROOT/mkosi
parts=("$mkosi/mkosi.conf" "$mkosi/mkosi.conf.d/release.conf")
SUITE=$(setting Release "$mkosi/mkosi.conf")
PACKAGES=$(setting Packages "${parts[@]}")
# the CNI project's plugins, which are a component (`firstlight components`)
PLUGINS=containernetworking-plugins
SIZE=8G
settings=$ROOT/tests/cluster/node

# The paths that mkosi removes, the shells among them.
removed() { setting RemoveFiles "${parts[@]}"; }

# Installs what the image has beside its packages, and then the differences: docs/testing-kubernetes.md names each.
system() {
  local root=$1 file
  cp -r --no-preserve=ownership "$mkosi/mkosi.extra/." "$root/"
  for file in $(setting ExtraTrees "${parts[@]}"); do
    install -D -m644 "$mkosi/${file%%:*}" "$root${file#*:}"
  done
  "$ROOT/systemd/install.sh" - "$root"
  systemctl --root "$root" --quiet preset-all
  BUILDROOT=$root "$mkosi/mkosi.finalize"
  cp -r --no-preserve=ownership "$settings/." "$root/"
  printf '[plugins."io.containerd.cri.v1.runtime"]\n  restrict_oom_score_adj = true\n' >>"$root/etc/containerd/config.toml"
}

case ${1:-} in
packages) echo "$PACKAGES"; exit ;;
removed) removed; exit ;;
system) system "$2"; exit ;;
esac
[ "$(id -u)" = 0 ] || die "making the node's disk needs root"

kubernetes=$("$ROOT/tools/kubernetes.sh")
containerd=$("$ROOT/tools/containerd.sh")/bin

recipe=$(printf '%s\n' "$SUITE" "$PACKAGES" "$PLUGINS" | sha256sum | cut -c1-12)
debian=$CACHE/node-debian-$recipe
if [ ! -e "$debian.tar" ]; then
  command -v mmdebstrap >/dev/null || die "mmdebstrap is missing: apt-get install mmdebstrap"
  say "installing Debian $SUITE for the node"
  rm -rf "$CACHE"/node-debian-*
  nice -n 10 mmdebstrap --quiet --mode=root --variant=minbase --include="$(paste -sd, <<<"$PACKAGES")" \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --customize-hook="chroot \"\$1\" sh -c 'cd /tmp && apt-get -qq download $PLUGINS && dpkg-deb -x $PLUGINS*.deb plugins && rm $PLUGINS*.deb'" \
    --customize-hook='tar cz -C "$1/tmp/plugins/usr/lib/cni" --sort=name --mtime=@1 --owner=0 --group=0 --numeric-owner . >"$1/cni-plugins.tgz"' \
    --customize-hook='rm -r "$1/tmp/plugins"' \
    "$SUITE" "$debian.$$.tar" "deb $(mirror) $SUITE main" >&2
  mv "$debian.$$.tar" "$debian.tar"
fi
if [ "${1:-}" = debian ]; then echo "$debian.tar"; exit; fi

recipe=$({ echo "$debian $kubernetes $containerd"; stat -c '%s %Y' "$kubernetes"/bin/*
  cd "$ROOT"; find systemd mkosi initramfs/dracut "${settings#"$ROOT"/}" -type f | sort | xargs sha256sum
  cat "$ROOT"/tools/{node-image,kubernetes-images,etcd-tools,flannel,image,lib}.sh; } | sha256sum | cut -c1-12)
image=$CACHE/node-$recipe
if [ -e "$image/state.img" ]; then echo "$image"; exit; fi

work=$(mktemp -d "$CACHE/node-work.XXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
root=$work/root
mkdir "$root"
tar x -C "$root" -f "$debian.tar"
rm -rf "${root:?}"/{dev,var/lib/apt/lists}; mkdir "$root/dev"
# mmdebstrap copies it from this machine
rm -f "$root/etc/hostname"

images=$("$ROOT/tools/kubernetes-images.sh" "$root")
pause=$(grep /pause: "$images/names")

system "$root"
# no registry has that of another version
sed -i "s|sandbox = .*|sandbox = \"$pause\"|" "$root/etc/containerd/config.toml"
install -D -m755 -t "$root/usr/lib/firstlight/components" "$kubernetes"/bin/{kubeadm,kubelet,kubectl}
install -m755 -t "$root/usr/bin" "$containerd"/{containerd,containerd-shim-runc-v2,ctr}
mkdir "$work/image"
cp "$root/cni-plugins.tgz" "$work/image/"
mv "$root/cni-plugins.tgz" "$root/usr/lib/firstlight/components/"

say "unpacking the images into containerd's store"
# by the node's own containerd; its store is a folder, and what it writes there is as good on the next kernel
mkdir -p "$root"/{images,state/var/lib/containerd}; cp "$images"/*.tar "$root/images/"
cp "$("$ROOT/tools/flannel.sh" "$root")/image.tar" "$root/images/flannel.tar"
# what the tests run as a user's workload
install -D -t "$work/web/bin" "$(command -v busybox)"
"$ROOT/tools/image.sh" "$root/images/web.tar" firstlight.local/web:1 /bin/busybox "$work/web"
cat >"$work/import" <<'SH'
set -e
root=$1
mount --make-rprivate /
mount -t proc proc "$root/proc"; mount -t tmpfs tmpfs "$root/run"; mount -t tmpfs tmpfs "$root/tmp"
mount --rbind /dev "$root/dev"; mount -t sysfs sysfs "$root/sys"
mount --bind "$root/state/var" "$root/var"
unset TMPDIR # a folder of this machine
printf 'version = 4\ndisabled_plugins = ["io.containerd.cri.v1.runtime"]\n' >"$root/tmp/import.toml"
chroot "$root" containerd --config /tmp/import.toml --log-level error & daemon=$!
for _ in $(seq 300); do [ ! -S "$root/run/containerd/containerd.sock" ] || break; sleep 0.1; done
for archive in "$root"/images/*.tar; do
  chroot "$root" ctr --namespace k8s.io images import "/images/$(basename "$archive")"
done
kill $daemon; wait $daemon || true
SH
nice -n 10 unshare --mount --pid --net --fork --kill-child bash "$work/import" "$root" >&2 ||
  die "the images cannot be unpacked"
rm -rf "$root/images"

for path in $(removed); do rm -rf "$root"$path; done

# nodes share the system, and each has a copy of the state
mv "$root/state" "$work/state"
for part in system:root state:state; do
  truncate -s "$SIZE" "$work/image/${part%:*}.img"
  SOURCE_DATE_EPOCH=1 mke2fs -q -t ext4 -E root_owner=0:0,nodiscard -d "$work/${part#*:}" "$work/image/${part%:*}.img"
done
for old in "$CACHE"/node-????????????; do rm -rf "$old"; done
mv "$work/image" "$image"
say "in MiB: $(cd "$image" && du -m ./*.img | paste -sd ' ')"
echo "$image"
