#!/usr/bin/env bash
# Lets OpenTofu make the machine of infra/libvirt with the real libvirt, waits until its kernel has a TPM, and deletes all again. It needs
# root, and an environment for OpenTofu. libvirt has mounts, a network and processes of its own, which end with the script: the system's
# libvirt does not change.
#
#   libvirt.sh TOFU FOLDER VARIABLES LATER CHANGED     in the folder of the module
#
# These are files with variables: LATER has more machines, CHANGED other values for the same machines. Writes into FOLDER the XML of what
# libvirt made, and what OpenTofu plans for LATER and CHANGED.
set -euo pipefail

if [ "$1" != inside ]; then
  exec unshare --mount --net --pid --fork --kill-child --mount-proc bash "$0" inside "$@"
fi
tofu=$2 folder=$3 variables=$4 later=$5 changed=$6

for place in /run /var/lib /var/log; do mount -t tmpfs tmpfs $place; done
mkdir -p /var/lib/libvirt/qemu/nvram /var/lib/swtpm-localca /var/log/libvirt/qemu /var/log/swtpm
mkdir "$folder/etc"
cp /etc/passwd /etc/group "$folder/"
# the packages of libvirt's clients and daemon do not make this user
echo 'libvirt-qemu:x:64055:64055::/:/bin/false' >>"$folder/passwd"
printf '%s:x:64055:\n' libvirt-qemu kvm >>"$folder/group"
for file in passwd group; do mount --bind "$folder/$file" "/etc/$file"; done
mount --bind "$folder/etc" /etc/libvirt
cat >/etc/libvirt/qemu.conf <<END
user = "root"
group = "root"
swtpm_user = "root"
swtpm_group = "root"
security_driver = "none"
cgroup_controllers = []
namespaces = []
END
ip link set lo up
virtlogd --daemon >"$folder/libvirtd.log" 2>&1
libvirtd --daemon >>"$folder/libvirtd.log" 2>&1
export LIBVIRT_DEFAULT_URI=qemu:///system

"$tofu" apply -input=false -auto-approve -var-file="$variables"
console=$folder/control-plane-0-console.log
for ((waited = 0; waited < 900; waited++)); do
  # the kernel's line about the tables of the firmware names the log of what it measured into the TPM
  ! grep -q TPMEventLog= "$console" || break
  sleep 1
done
((waited < 900)) || { tail "$console"; exit 1; }
virsh dumpxml control-plane-0 >"$folder/machine.xml"
virsh net-dumpxml firstlight >"$folder/network.xml"
# nothing is left to do: libvirt has what the module says
"$tofu" plan -input=false -detailed-exitcode -var-file="$variables"
"$tofu" plan -input=false -out=later -var-file="$later"
"$tofu" show -json later >"$folder/later.json"
"$tofu" plan -input=false -out=changed -var-file="$changed"
"$tofu" show -json changed >"$folder/changed.json"
"$tofu" destroy -input=false -auto-approve -var-file="$variables"
[ -z "$(virsh list --all --name)$(virsh net-list --all --name)$(virsh pool-list --all --name)" ]
