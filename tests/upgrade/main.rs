//! Programs, disks, files and objects of the previous release with those of today (`make test-upgrade`). docs/support.md says what is
//! promised between versions.

mod changes;
mod chart;
mod cluster;
mod node;
mod tickets;
