//! Firstlight makes a fresh confidential VM a trusted node of a Kubernetes cluster.
//!
//! One library under four programs (`src/bin`). The arrows point one way: flows ([`bootstrapper`], [`state_disk`],
//! [`join_service`], [`key_service`]) use mechanisms ([`grpc`], [`atls`], [`attestation`], [`luks`], [`device_mapper`],
//! [`tpm`], [`kms`], [`metadata`], [`ssh`], [`kubernetes`]), which use plain helpers ([`crypto`], [`metrics`], [`pool`], [`sys`]).
//! `docs/architecture.md` has the picture.
#![deny(unsafe_code)]

pub mod atls;
pub mod attestation;
pub mod backoff;
pub mod bootstrapper;
pub mod cli;
pub mod crypto;
pub mod der;
pub mod device_mapper;
pub mod grpc;
pub mod h2;
pub mod half_open;
pub mod join_service;
pub mod key_service;
pub mod kms;
pub mod kubernetes;
pub mod logger;
pub mod luks;
pub mod metadata;
pub mod metrics;
#[cfg(test)]
mod mutation;
pub mod network;
pub mod pool;
pub mod program;
pub mod proto;
pub mod quotes;
mod server_metrics;
pub mod share;
pub mod ssh;
pub mod state_disk;
pub mod stop;
mod sync;
pub mod sys;
pub mod tickets;
pub mod time;
pub mod timeline;
pub mod tpm;
pub mod turns;
