# Everything here installs what it needs first (tools/setup.sh) and keeps it in a cache outside the checkout.
.DEFAULT_GOAL := help
.PHONY: help setup build test unit boot lint demo bench storm image test-cluster kubeadm kubernetes-api h2spec proto fuzz check-deps reproducible deny

# the C library of the shipped programs: musl, or gnu (a static glibc) where there is no musl standard library
TARGET = musl

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## install what is missing: Debian packages, the musl standard library, a static tpm2-tss, a kernel
	@tools/setup.sh

build: setup ## the five programs, static, in target/dist (TARGET=gnu: static glibc, target/dist-gnu)
	@tools/build.sh $(TARGET)

test: lint check-deps unit boot ## everything that must pass before a change lands

lint: setup ## formatting, clippy, shell syntax
	cargo fmt --all --check
	cargo clippy --locked --all-targets --bench storm -- -D warnings
	@for script in tools/*.sh tests/cluster/*.sh initramfs/build.sh .ci/run; do bash -n $$script || exit; done

unit: setup ## unit tests, and the tests against real peers that need no VM
	cargo test --locked

boot: build ## the tests that boot VMs; each console is kept in target/boot
	cargo test --locked --test boot -- --ignored --nocapture --test-threads=2

image: build ## a container image of the services, for `firstlight apply`: target/dist/firstlight-image.tar (IMAGE=NAME)
	@tools/image.sh

test-cluster: image ## init makes a real Kubernetes cluster of a node in namespaces; needs root
	@tools/node-image.sh >/dev/null
	cargo test --locked --test cluster --no-run
	unshare --net cargo test --locked --offline --test cluster -- --ignored --nocapture --test-threads=1

kubeadm: setup ## kubeadm of the newest release, and of an older one, takes what we tell it
	@tools/kubeadm.sh

kubernetes-api: setup ## our Kubernetes client, services, tickets, keys and Helm chart, against a real kube-apiserver, etcd and Helm
	cargo test --locked --test kubernetes_api --test kubernetes_services --test kubernetes_keys --test join_service -- --ignored

demo: setup ## a VM: first boot, init, a reboot that unlocks itself, a tampered one that must not, one with recovery
	@tools/demo.sh

bench: build ## compare with the peers
	cargo bench --locked

storm: setup ## nodes that arrive all at once at one join service, with a real API server: tickets a second, waits, memory
	@tools/kubernetes.sh kube-apiserver etcd >/dev/null
	cargo bench --locked --bench storm

proto: setup ## write src/proto anew from proto/
	UPDATE_PROTO=1 cargo test --locked --test proto

h2spec: setup ## the public HTTP/2 conformance suite against our server, plaintext and TLS
	@tools/h2spec.sh

fuzz: setup ## one minute of each fuzz target; `tools/fuzz.sh SECONDS TARGET..` for more
	@tools/fuzz.sh

check-deps: setup ## no async runtime in a shipped program
	@tools/check-deps.sh

reproducible: setup ## two builds in different directories give the same bytes
	@tools/reproducible.sh

deny: setup ## licenses, bans and sources of all crates
	@tools/deny.sh
