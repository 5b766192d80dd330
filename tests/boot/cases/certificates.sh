#!/bin/busybox sh
# Three years of a control plane: etcd, kube-apiserver, kube-controller-manager and kube-scheduler as
# kubeadm configures them, a kubelet with containerd, the member controller that approves its certificates, `bootstrapper renew` as its timer
# runs it. date(1) moves the clock of this machine to the next day on which something must, or must not, happen.
# The kubelet runs no pods: `pod` starts the programs of its manifests.
check() {
  what=$1; shift
  if out=$("$@" 2>&1); then echo "PASS $what"; return; fi
  echo "FAIL $what: $out"
  for log in /tmp/*.log; do echo "== $log"; tail -n 8 "$log"; done
  exit 1
}
not() { ! "$@"; }
until_true() { tries=$1; shift; while ! "$@" >/dev/null 2>&1; do tries=$((tries - 1)); [ $tries -gt 0 ] || { "$@"; return 1; }; sleep 2; done; }
kubernetes=/etc/kubernetes pki=/etc/kubernetes/pki kubelet=/var/lib/kubelet/pki node=control-plane-0
export KUBECONFIG=$kubernetes/admin.conf
# collect garbage rarely: this machine has much memory and little time
export GOGC=400
programs="kube-apiserver kube-controller-manager kube-scheduler"

# arguments NAME: the command of a static pod, one word a line
arguments() { awk '/- command:/ {on = 1; next} on && sub(/^    - /, "") {print; next} {on = 0}' "$kubernetes/manifests/$1.yaml"; }
# answers PORT PATH: the program there says that it is healthy
answers() {
  printf "GET $2 HTTP/1.0\r\n\r\n" | openssl s_client -quiet -connect "127.0.0.1:$1" 2>/dev/null | grep -q '^HTTP.* 200 '
}
healthy() {
  case $1 in
  # it asks etcd
  kube-apiserver | etcd) answers 6443 /readyz ;;
  kube-controller-manager) answers 10257 /healthz ;;
  kube-scheduler) answers 10259 /healthz ;;
  esac
}
# show NAME: replaces the pod of this component in the API by one with the annotation of its manifest, which is ready
show() {
  healthy "$1" || return
  pods=/api/v1/namespaces/kube-system/pods pod=$1-$node
  ends=$(sed -n 's/^    firstlight.certificate-ends: "\(.*\)"$/\1/p' "$kubernetes/manifests/$1.yaml")
  cat >"/tmp/$1.json" <<END
{"apiVersion": "v1", "kind": "Pod",
 "metadata": {"name": "$pod", "labels": {"tier": "control-plane", "component": "$1"}, "annotations": {"firstlight/certificate-ends": "$ends"}},
 "spec": {"schedulerName": "none", "containers": [{"name": "$1", "image": "none"}]},
 "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
END
  kubectl delete --raw "$pods/$pod?gracePeriodSeconds=0" >/dev/null 2>&1
  kubectl create --raw $pods -f "/tmp/$1.json" && kubectl replace --raw "$pods/$pod/status" -f "/tmp/$1.json"
}
# pod NAME: runs a program of a manifest, again if it ends, and anew if the manifest changes
pod() {
  name=$1 manifest=$kubernetes/manifests/$1.yaml
  while :; do
    IFS='
'
    # shellcheck disable=SC2046 # an argument a line
    set -- $(arguments "$name")
    unset IFS
    hash=$(md5sum <"$manifest") shown=
    "$@" >>"/tmp/$name.log" 2>&1 &
    process=$!
    while kill -0 $process 2>/dev/null && [ "$hash" = "$(md5sum <"$manifest")" ]; do
      [ "$shown" ] || if show "$name" >"/tmp/$name.show" 2>&1; then shown=yes; event "$name is ready"; fi
      sleep 2
    done
    [ "$hash" = "$(md5sum <"$manifest")" ] || echo "$name" >>/tmp/replaced
    # at once: an API server with watches takes a minute to end by itself
    kill -9 $process 2>/dev/null
    wait $process 2>/dev/null
    event "$name has ended"
  done
}
event() { read -r up _ </proc/uptime; echo "$up s: $*"; }
replaced() { grep -c . /tmp/replaced; }
# unit NAME COMMAND..: runs a program, again if it ends
unit() { name=$1; shift; while :; do "$@" >>"/tmp/$name.log" 2>&1; sleep 1; done; }
run_kubelet() {
  . /var/lib/kubelet/kubeadm-flags.env
  kubelet --kubeconfig=$kubernetes/kubelet.conf --config=/var/lib/kubelet/config.yaml $KUBELET_KUBEADM_ARGS
}
run_member_controller() {
  member-controller --kubeconfig $KUBECONFIG
}

served() { openssl s_client -connect "$1" </dev/null 2>/dev/null | openssl x509 -noout -fingerprint; }
serves() { [ "$(served "$1")" = "$(openssl x509 -noout -fingerprint -in "$2")" ]; }
of_kubeconfig() { sed -n 's/.*client-certificate-data: //p' "$1" | base64 -d; }
# lasts DAYS: each certificate that kubeadm renews is valid for so long
lasts() {
  for file in $pki/apiserver*.crt $pki/front-proxy-client.crt $pki/etcd/server.crt $pki/etcd/peer.crt $pki/etcd/healthcheck-client.crt; do
    openssl x509 -noout -checkend $(($1 * 86400)) -in "$file" >/dev/null || { echo "$file ends within $1 days"; return 1; }
  done
  for file in admin super-admin controller-manager scheduler; do
    of_kubeconfig $kubernetes/$file.conf | openssl x509 -noout -checkend $(($1 * 86400)) >/dev/null || { echo "$file.conf ends within $1 days"; return 1; }
  done
}
# kubelet_lasts DAYS: both certificates of the kubelet are valid for so long
kubelet_lasts() {
  for kind in client server; do
    openssl x509 -noout -checkend $(($1 * 86400)) -in $kubelet/kubelet-$kind-current.pem >/dev/null || { echo "kubelet-$kind ends within $1 days"; return 1; }
  done
}
all_last() { lasts "$1" && kubelet_lasts "$1"; }
of_kubelet() { for kind in client server; do readlink $kubelet/kubelet-$kind-current.pem; done; }
# renews NAMESPACE LEASE: its holder has renewed it less than a minute ago, with the certificate that it has
renews() {
  seen=$(kubectl -n "$1" get lease "$2" -o 'jsonpath={.spec.renewTime}') && seen=${seen%.*} &&
    [ $(($(date +%s) - $(date -u -D '%Y-%m-%dT%H:%M:%S' -d "$seen" +%s))) -lt 60 ]
}
# The API server, with the certificate of its client, reaches the kubelet, whose certificate it verifies
reaches_kubelet() { [ "$(kubectl get --raw /api/v1/nodes/$node/proxy/healthz)" = ok ]; }
doctor() { firstlight doctor --policy /etc/join-service/attestationConfig --timeout 20s -o json 2>/tmp/doctor.log; }
warns_of_certificate() { doctor >/tmp/doctor.json; grep '"certificates"' /tmp/doctor.json; }
renew() { event renew; bootstrapper renew >/tmp/renew.log 2>&1; code=$?; event "exit code $code"; }

# arrive DAY: moves the clock to this day
arrive() {
  check "day $1: until then no certificate ends" all_last $(($1 - today))
  today=$1 before=$(replaced) of_kubelet=$(of_kubelet)
  date -s "@$((start + today * 86400))" >/dev/null
}
# A reboot starts the kubelet again. It waits for its next renewal by a clock that date(1) does not move.
reboots() { killall kubelet member-controller; }
everything_works() {
  check "day $today: the API server is ready" until_true 150 healthy kube-apiserver
  check "day $today: the administrator reaches the API server, and that reaches etcd" kubectl get --raw /readyz/etcd
  check "day $today: the controller manager works" until_true 100 renews kube-system kube-controller-manager
  check "day $today: the scheduler works" until_true 100 renews kube-system kube-scheduler
  check "day $today: the kubelet works" until_true 100 renews kube-node-lease $node
  check "day $today: the API server reaches the kubelet" until_true 30 reaches_kubelet
}
nothing_is_renewed() {
  check "day $today: a run succeeds" test $code = 0
  check "day $today: it replaces no pod" test "$(replaced)" = "$before"
}
is_renewed() {
  check "day $today: a run succeeds" test $code = 0
  check "day $today: it renews each certificate" lasts 364
  check "day $today: it replaces three pods" test $(($(replaced) - before)) = 3
  check "day $today: the API server serves its new certificate" serves 127.0.0.1:6443 $pki/apiserver.crt
  check "day $today: etcd serves its new certificate to clients" serves 127.0.0.1:2379 $pki/etcd/server.crt
  check "day $today: etcd serves its new certificate to members" serves 10.42.0.15:2380 $pki/etcd/peer.crt
}

mkdir -p /run/state/bin /etc/kubernetes/none /opt/kubernetes/patches /tmp /etc/cni/net.d /etc/containerd
echo $node >/proc/sys/kernel/hostname
# the kubelet looks for its user there
echo 'root:x:0:0:root:/root:/bin/sh' >/etc/passwd
mount -t cgroup2 cgroup /sys/fs/cgroup
# the kubelet measures file systems, but not the root of an initramfs
for folder in /var/lib/kubelet /var/lib/containerd; do mkdir -p $folder; mount -t tmpfs state $folder; done
# the kubelet checks them (protectKernelDefaults)
echo 1 >/proc/sys/vm/overcommit_memory; echo 10 >/proc/sys/kernel/panic; echo 1 >/proc/sys/kernel/panic_on_oops
# a network that no pod uses, so that the Node is ready
echo '{"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "none"}]}' >/etc/cni/net.d/10-none.conflist
printf 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd]\nsnapshotter = "native"\n' >/etc/containerd/config.toml
: >/tmp/replaced
# kubeadm looks for its configuration in the API, and waits a minute for the annotation of a pod that the kubelet has started
mv /usr/bin/kubeadm /usr/bin/real-kubeadm
cat >/usr/bin/kubeadm <<'END'
#!/bin/busybox sh
case $1 in certs) set -- "$@" --config /etc/kubeadm.yaml ;; esac
exec /usr/bin/real-kubeadm "$@"
END
chmod 755 /usr/bin/kubeadm
ln -s /usr/bin/kubeadm /run/state/bin/kubeadm
unit containerd containerd &
for phase in "certs all" "kubeconfig all" "kubelet-start" "control-plane all" "etcd local"; do
  kubeadm init phase $phase --config /etc/kubeadm.yaml >/tmp/kubeadm.log 2>&1 || { echo "FAIL $phase: $(cat /tmp/kubeadm.log)"; exit 1; }
done
# no pods, and no systemd
sed -i 's|^staticPodPath: .*|staticPodPath: /etc/kubernetes/none|; s/^cgroupDriver: .*/cgroupDriver: cgroupfs\ncgroupsPerQOS: false\nenforceNodeAllocatable: []\nlocalStorageCapacityIsolation: false/' \
  /var/lib/kubelet/config.yaml
start=$(date +%s) today=0
for name in etcd $programs; do pod $name & done
check "the control plane starts" until_true 200 healthy kube-apiserver
# as `kubeadm init` does
check "the administrator may do everything" kubectl --kubeconfig $kubernetes/super-admin.conf create clusterrolebinding \
  kubeadm:cluster-admins --clusterrole cluster-admin --group kubeadm:cluster-admins
check "there is a ConfigMap for machines that join" kubeadm init phase bootstrap-token --config /etc/kubeadm.yaml --kubeconfig $KUBECONFIG
check "only the member controller approves certificates" kubectl delete clusterrolebinding \
  kubeadm:node-autoapprove-bootstrap kubeadm:node-autoapprove-certificate-rotation
check "there is kubeadm's ConfigMap" kubeadm init phase upload-config kubeadm --config /etc/kubeadm.yaml --kubeconfig $KUBECONFIG
# as `bootstrapper` does
check "the machine has a record" kubectl create -f /etc/record.json
unit kubelet run_kubelet &
unit member-controller run_member_controller &
check "the kubelet gets its certificates" until_true 100 kubelet_lasts 364
check "there is the kubelet's ConfigMap" kubeadm init phase upload-config kubelet --config /etc/kubeadm.yaml --kubeconfig $KUBECONFIG
check "kubelet.conf names the certificate that the kubelet renews" kubeadm init phase kubelet-finalize all --config /etc/kubeadm.yaml
killall kubelet
everything_works
etcd=$(pidof etcd)

# Each certificate is valid for 365 days. The control plane renews when 119 days are left; the kubelet when 10 to 30 % are left, which are
# 36 to 110 days.
for day in 240 246 330 492 660 738 984 990 1094; do
  arrive $day
  renew
  case $day in
  246 | 492 | 738 | 984) is_renewed ;;
  *) nothing_is_renewed ;;
  esac
  case $day in 240 | 330 | 492 | 660 | 738 | 990) reboots ;; esac
  everything_works
  case $day in
  330 | 660 | 990) check "day $day: the kubelet renews its certificates" until_true 60 kubelet_lasts 255 ;;
  240 | 492 | 738) check "day $day: the kubelet keeps its certificates" test "$(of_kubelet)" = "$of_kubelet" ;;
  esac
done
check "in three years each pod was replaced four times" test "$(replaced)" = 12
check "etcd is the same process" test "$(pidof etcd)" = "$etcd"
check "nothing is left of a renewal" not test -e $kubernetes/firstlight-renewal.json
check "firstlight doctor finds no certificate that ends soon" not warns_of_certificate
