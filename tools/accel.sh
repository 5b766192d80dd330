#!/usr/bin/env bash
# Prints the arguments that select QEMU's processor: KVM if a probe machine boots with it, otherwise emulation.
#
# The existence of /dev/kvm proves nothing: in a nested machine it may hang. So this script boots a kernel until its init prints a
# line, within a time limit. It keeps the result until this machine reboots. With FIRSTLIGHT_ACCEL=kvm|tcg|icount there is no probe.
. "$(dirname "$0")/lib.sh"

LIMIT=15
KVM="-accel kvm -cpu host"
# without cmpxchg16b: QEMU 7.2 emulates it in a way that crashes guest kernels
TCG="-accel tcg,thread=multi -cpu qemu64,-cx16"
# for benchmarks: an instruction takes 1 ns of the machine's clock, so other work of this machine does not change the times
COUNTED="-accel tcg,thread=single -cpu qemu64,-cx16 -icount shift=0"

case ${FIRSTLIGHT_ACCEL:-} in
kvm) echo "$KVM"; exit ;;
tcg) echo "$TCG"; exit ;;
icount) echo "$COUNTED"; exit ;;
'') ;;
*) die "FIRSTLIGHT_ACCEL is ${FIRSTLIGHT_ACCEL}, it must be kvm, tcg or icount" ;;
esac

answer=$CACHE/accel-$(cat /proc/sys/kernel/random/boot_id)
if [ -e "$answer" ]; then cat "$answer"; exit; fi

probe() {
  [ -r /dev/kvm ] && [ -w /dev/kvm ] || { say "no /dev/kvm for this user: QEMU emulates the processor"; return 1; }
  local kernel tree
  kernel=$("$(dirname "$0")/kernel.sh")
  tree=$(mktemp -d); trap 'rm -rf "$tree"' RETURN
  mkdir "$tree/guest" "$tree/guest/bin"
  cp "$(command -v busybox)" "$tree/guest/bin/busybox"
  printf '#!/bin/busybox sh\necho the probe is up\n' >"$tree/guest/init"; chmod +x "$tree/guest/init"
  (cd "$tree/guest" && find . | cpio --quiet -o -H newc >"$tree/probe.cpio")
  say "probing KVM (at most $LIMIT s)"
  # the init ends after the line, so the kernel panics and QEMU ends
  # QEMU runs in a shell of its own: if QEMU aborts, that shell writes the message about it into the log
  (
    timeout -k 1 "$LIMIT" qemu-system-x86_64 $KVM -M q35 -m 256 -nodefaults -no-reboot -display none -serial stdio \
      -kernel "$kernel"/boot/vmlinuz-* -initrd "$tree/probe.cpio" -append "console=ttyS0 quiet panic=-1" </dev/null || true
  ) >"$tree/log" 2>&1
  grep -q 'the probe is up' "$tree/log" || { say "KVM does not boot a kernel here: QEMU emulates the processor"; return 1; }
}

mkdir -p "$CACHE"; rm -f "$CACHE"/accel-*
if probe; then echo "$KVM"; else echo "$TCG"; fi >"$answer.$$"
mv "$answer.$$" "$answer"; cat "$answer"
