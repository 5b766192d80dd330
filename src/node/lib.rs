//! What the two programs on a node share: [`options`] parses the command line and starts a program, [`settings`]
//! reads the image's settings, [`ticket_client`] requests tickets from the join services, [`quotes`] reports attestation on the
//! console, [`service_trust`] is what a node demands of join services, [`record`] gives everybody the record of the boot.

pub mod options;
pub mod quotes;
pub mod record;
pub mod service_trust;
pub mod settings;
pub mod ticket_client;
