# Each target first installs what it needs (tools/setup.sh); downloads are kept in a cache outside the checkout.
.DEFAULT_GOAL := help
.PHONY: help setup setup-build build test unit boot test-images test-host test-powercut lint demo bench storm watch-load image mkosi test-cluster test-whole test-network cloud-pages kubeadm kubernetes-api test-inside test-certificates test-cluster-api h2spec proto fuzz check-deps deb release test-release test-upgrade test-standalone reproducible reproducible-image deny model docs reproducible-kernel nightly nightly-due mutants

# the C library of the shipped programs: musl, or gnu (a static glibc) if there is no musl standard library
TARGET = musl

help: ## print this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## install the tools that building and testing need: Debian packages, the musl standard library, a kernel
	@tools/setup.sh

setup-build: # only what building needs
	@tools/setup.sh build

build: setup-build ## build the seven programs, static, in target/dist (TARGET=gnu: static glibc, target/dist-gnu)
	@tools/build.sh $(TARGET)

test: lint check-deps ## run everything that must pass before a change lands
	@tools/unit.sh tools/build.sh
	@$(MAKE) --no-print-directory boot

lint: setup ## check formatting, clippy, shellcheck, subjects of commits
	cargo fmt --all --check
	cargo clippy --locked --all-targets -- -D warnings
	cargo clippy --locked --bench storm -- -D warnings # it is not one of "all targets": bench = false
	@tools/subjects.sh
	@tools/shellcheck.sh

unit: setup ## run the unit tests, and the tests against real peers that need no VM, several programs at once; prints the slowest ten
	@tools/unit.sh

boot: setup build ## run the tests that boot VMs; each console is kept in target/boot
	cargo test --locked --test boot -- --ignored --nocapture --test-threads=2
	cargo test --locked --test images -- --ignored --nocapture --test-threads=2 pairs:: measure::a_disk_with_the_stub_of_systemd_252

test-images: setup build ## boot images of all kinds: initrds of dracut and initramfs-tools, also with faults; unified kernel images with each systemd-stub; the image of mkosi (needs root)
	cargo test --locked --test images -- --ignored --nocapture --test-threads=2
	cargo test --locked --test measure -- --ignored
	FIRSTLIGHT_KERNEL=trixie cargo test --locked --test boot -- --ignored --nocapture disk_mapping # dm-integrity of another kernel
	cargo test --locked --test hardware_tdx --test hardware_snp --test cloud_vtpm -- --ignored --nocapture

test-powercut: setup build ## boot a machine after power cuts at any write to its disk: 100 each in init, as a member, in a reset, in a migration, in an update of the image (an hour; needs root for the image; FIRSTLIGHT_POWER_CUTS=N, FIRSTLIGHT_SEED=N)
	FIRSTLIGHT_POWER_CUTS=$${FIRSTLIGHT_POWER_CUTS:-100} cargo test --locked --test boot --test images -- --ignored --nocapture --test-threads=2 power_cut_at_any

test-host: setup build ## boot every image with all data that a host can pass to a machine, and the same systems without Firstlight (needs root)
	cargo test --locked --test host -- --ignored --nocapture --test-threads=2

image: build ## make a container image of the services, for `firstlight apply`: target/dist/firstlight-image.tar (IMAGE=NAME)
	@tools/image.sh

PROFILE = release
mkosi: setup build ## build a node's disk image with mkosi: Debian 13, verified root, one measured file that boots; needs root (PROFILE=debug: with a shell)
	@tools/mkosi.sh $(PROFILE)

# the oldest minor version that its project supports; a test upgrades a cluster to the default of tools/kubernetes.sh
test-cluster: export KUBERNETES_VERSION = v1.35.4
test-cluster: setup image ## make a real Kubernetes cluster whose nodes run in Linux namespaces; needs root
	@tools/node-image.sh >/dev/null
	@tools/kubernetes-next.sh >/dev/null
	@tools/etcd-tools.sh >/dev/null
	cargo test --locked --test cluster --no-run
	unshare --net cargo test --locked --offline --test cluster -- --ignored --nocapture --test-threads=1

test-network: setup ## boot two machines with flannel, and search the frames between them for what their pods send each other
	@tools/setup.sh iptables nftables containernetworking-plugins
	cargo test --locked --test network -- --ignored --nocapture

cloud-pages: setup ## run the commands of docs/clouds with the clouds' own clients: AWS's against moto, Azure's and OpenStack's with their parsers, libvirt's with libvirt; check infra/ with OpenTofu
	@tools/setup.sh qemu-utils jq libvirt-daemon libvirt-clients libvirt-daemon-driver-qemu virtinst libxml2-utils haproxy dnsmasq-base xsltproc
	cargo test --locked --test cloud_pages -- --ignored --nocapture --test-threads=2

test-whole: setup image ## boot virtual machines with the image of mkosi, make a real Kubernetes cluster of them, cut their power, lose machines, update them, move their clocks by a year; needs root (STEP=rejoin|operator|faults|replace|etcd|rollout|fallback|upgrade|year: one step, from a saved cluster)
	@tests/whole/prepare.sh >/dev/null
	cargo test --locked --test whole --no-run
	PATH="$$(tools/qemu.sh):$$PATH" unshare --net cargo test --locked --offline --test whole $(if $(STEP),step_$(STEP),from_power_on) -- --ignored --nocapture --test-threads=1

kubeadm: setup ## check that kubeadm of each supported version that can be built, from v1.34 on, accepts our configurations
	@tools/kubeadm.sh

kubernetes-api: setup ## test our Kubernetes client, services, tickets, keys and Helm chart with a real kube-apiserver, etcd and Helm; a CSI driver in VMs opens an encrypted volume
	cargo test --locked --test addons --test chart --test etcd_backup --test kubernetes_api --test kubernetes_migrate --test kubernetes_services --test kubernetes_keys --test join_service --test node --test node_remove -- --ignored --skip cluster_api
	cargo test --locked -p firstlight-bootstrapper restore -- --ignored
	cargo test --locked --test csi -- --ignored --nocapture
	cargo test --locked --test key_wrapping -- --ignored

test-inside: setup ## play root on a worker and a tenant of a namespace against a real kube-apiserver, etcd and kube-controller-manager with the services' objects
	cargo test --locked --test inside -- --ignored

test-certificates: setup build ## run a control plane and its kubelet through three years of a clock that is moved
	@tools/setup.sh containerd
	cargo test --locked --test certificates -- --ignored --nocapture

test-cluster-api: setup ## scale a cluster from one worker to five and back to one with Cluster API and the provider of its tests, and try to join with all data that it has
	@tools/cluster-api.sh >/dev/null
	cargo test --locked --test join_service cluster_api -- --include-ignored --nocapture

nightly: setup ## run all targets that test, the most overdue first, and write the results into tests/ledger.tsv (HOURS=6)
	@tools/nightly.sh

nightly-due: ## print the targets whose last green result is too old
	@tools/nightly.sh due

demo: setup ## boot a VM: first boot, init, a reboot that unlocks the disk, one with a changed image that must not, one with recovery
	@tools/demo.sh

bench: setup build ## measure our programs and those that they replace, side by side
	cargo bench --locked

storm: setup ## measure one join service to which many nodes connect at the same time, with a real API server: tickets per second, waits, memory; the same with faults, and with three replicas
	@tools/kubernetes.sh kube-apiserver etcd >/dev/null
	cargo bench --locked --bench storm
	cargo bench --locked --bench storm -- faults 500
	cargo bench --locked --bench storm -- replicas 10000

watch-load: setup ## measure what a join service needs to ask 10 000 members for evidence once in 5 minutes, with a real API server (7 minutes)
	@tools/kubernetes.sh kube-apiserver etcd >/dev/null
	cargo bench --locked --bench storm -- watch 10000 300

proto: setup ## generate src/proto from proto/
	UPDATE_PROTO=1 cargo test --locked --test proto

h2spec: setup ## run the public HTTP/2 conformance suite against our server, plaintext and TLS
	@tools/h2spec.sh

fuzz: setup ## run each fuzz target for a minute; `tools/fuzz.sh SECONDS TARGET..` for more
	@tools/fuzz.sh

check-deps: setup ## check the crates of each program: no async runtime, unlock's limits, the picture and the list of crates in docs/architecture.md
	@tools/check-deps.sh

deb: setup build ## make Debian packages in target/deb, and check them with lintian, apt, dpkg, dracut and initramfs-tools
	@tools/setup.sh lintian
	@tools/deb.sh >/dev/null
	cargo test --locked --test packages -- --ignored

release: deb image ## collect the files of a release, with notes and checksums, in target/firstlight-VERSION (KEY=FILE: sign them with this SSH key; KEY_GPG=NAME: sign the apt repository); needs root
	@tools/setup.sh gpg
	@tools/release.sh

test-release: deb image ## make a release, and do what docs/get-started.md says in its folder alone: with a virtual machine; needs root
	@tools/setup.sh jq skopeo gpg gpgv gpgconf gpg-agent
	cargo test --locked --test release -- --ignored --nocapture

test-upgrade: setup ## run programs, disks, files, charts and objects of the previous release with those of today, in both directions, with a real API server
	@tools/setup.sh jq
	@tools/previous.sh >/dev/null
	@tools/kubernetes.sh kube-apiserver etcd kubectl >/dev/null
	cargo test --locked --test upgrade -- --ignored --test-threads=4

test-standalone: deb ## do what docs/standalone.md says on two virtual machines with Debian 12: a key broker, and a machine whose volume opens at each boot; needs root
	cargo test --locked --test standalone_page -- --ignored --nocapture

reproducible: deb ## check that two builds in different folders give the same bytes: programs, packages, initrds
	@tools/reproducible.sh

reproducible-image: setup build ## check that two builds of the image of mkosi, in different folders, give the same bytes; needs root
	@tools/reproducible-image.sh

reproducible-kernel: setup ## check that two builds of the kernel of that image, in different folders, give the same bytes; needs root, takes an hour
	@tools/reproducible-kernel.sh

deny: setup ## check licenses, bans and sources of all crates
	@tools/deny.sh

model: ## check the protocol as models (models/) with Verifpal: each claim holds, and each weakening gives an attack
	@tools/model.sh

mutants: setup ## change single places of the crates that judge, encrypt and talk, and count what their tests notice (tests/mutants.tsv; SAMPLE=20 changes of each crate, SEED=0)
	@tools/mutants.sh

docs: ## make a book of the documents: target/book/html/index.html; reading it needs no network
	@tools/docs.sh
