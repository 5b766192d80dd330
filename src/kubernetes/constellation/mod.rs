//! What exists only for clusters of Constellation that have not moved yet: the option that opens their disks without records
//! ([`migration`]), their CSI drivers ([`drivers`]) and the network that makes these safe ([`outside`]), and what their node operator
//! brings all nodes to ([`node_version`]).

pub mod drivers;
pub mod migration;
pub mod node_version;
pub mod outside;
