//! Helpers of several tests that use our crates: add-ons, attested peers, a host that gives evidence, a real API server with volumes,
//! a join service in it, a validator at another time, programs of the previous release, servers that publish Kubernetes, a machine on loopback with its environment.

pub mod addons;
pub mod area_key;
pub mod at;
pub mod attested;
pub mod aws;
pub mod cloud_server;
pub mod constellation;
pub mod evidence;
pub mod forger;
pub mod join_setup;
pub mod joining;
pub mod kube_apiserver;
pub mod long_certificate;
pub mod manifests;
pub mod objects;
pub mod previous;
pub mod published;
pub mod setting;
pub mod simple_server;
pub mod volumes;
