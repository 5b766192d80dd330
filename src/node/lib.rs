//! What the two programs on a node share: [`options`] parses the command line and starts a program,
//! [`settings`] reads the image's settings, [`ticket_client`] requests tickets from the join
//! services in the list of `hosts`, [`quotes`] reports attestation on the console, [`ending`] waits for a thread,
//! [`service_trust`] has the settings about join services, [`record`] sends the record of the boot
//! to every caller.

pub mod ending;
mod hosts;
pub mod options;
pub mod quotes;
pub mod record;
pub mod service_trust;
pub mod settings;
pub mod ticket_client;
