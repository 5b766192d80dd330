//! What the two programs on a node share: [`options`] parses the command line and starts a program, [`settings`]
//! reads the image's settings, [`ticket_client`] requests tickets from the join services, [`quotes`] reports attestation on the
//! console.

pub mod options;
pub mod quotes;
pub mod settings;
pub mod ticket_client;
