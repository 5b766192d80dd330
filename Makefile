# `make help` lists what there is. Each target prepares the machine first; that takes no time when nothing is missing.
.DEFAULT_GOAL := help
.PHONY: help setup build test demo bench proto lint check-deps deny reproducible
SHELL := bash

# the C library of the shipped programs: musl, or gnu where Rust's musl target is not to be had
TARGET = $(shell cat .deps/target 2>/dev/null || echo musl)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \t\2/p' Makefile | expand -t 22

setup: ## install what is missing: Debian packages, Rust's musl target, a static tpm2-tss, a kernel
	@tools/setup.sh
	@if [ "$(TARGET)" = gnu ]; then tools/setup.sh gnu; fi

build: setup ## the four programs, static, in target/dist (TARGET=gnu: on glibc)
	@tools/build.sh $(TARGET)

test: build ## all tests, those that boot machines too; their consoles are kept in target/boot
	cargo test --locked

demo: build ## a machine from power-on to an unlocked disk, rebooted, and recovered
	@cargo run --locked --quiet --example demo

bench: build ## how fast it is, beside cryptsetup, grpcio and tonic
	@tools/bench.sh

proto: setup ## src/proto from proto/
	UPDATE_PROTO=1 cargo test --locked --test proto
	cargo fmt

lint: setup ## rustfmt, clippy, shell syntax
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	@for script in tools/*.sh initramfs/build.sh .ci/run; do bash -n $$script; done

check-deps: setup ## no asynchronous runtime in the shipped programs
	@tools/check-deps.sh

deny: setup ## licences, sources and advisories of the dependencies, by cargo-deny
	@command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny --locked check

reproducible: setup ## build twice in two folders and compare the bytes
	@tools/reproducible.sh
