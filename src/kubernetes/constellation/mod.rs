//! What exists only for clusters of Constellation that have not moved yet: their CSI drivers ([`drivers`]), the network that makes
//! these safe ([`outside`]), and what their node operator brings all nodes to ([`node_version`]).

pub mod drivers;
pub mod node_version;
pub mod outside;
