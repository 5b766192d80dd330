//! Answers systemd-cryptsetup, which reads the key of a volume from a socket (crypttab(5), "key
//! acquisition via AF_UNIX sockets"): the name of its own socket says which volume it opens.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;

use base::stop::Stop;
use booted_base::uuid::Uuid;

use super::broker;
use super::cryptsetup::Luks;
use super::error::Error;
use super::settings::Volume;

/// What is between the random part and the volume's name in the name of systemd-cryptsetup's socket.
const PURPOSE: &str = "cryptsetup";

/// Answers the connection on the standard input, which systemd has accepted. The key goes to the
/// other end only if it opens the volume.
pub fn run(folder: &Path, stop: &Stop) -> Result<(), Error> {
    let socket = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(Error::Connection)?;
    let mut socket = UnixStream::from(socket);
    let name = name_of(&socket.peer_addr().map_err(Error::Connection)?)?;
    let volume = Volume::read(folder, &name)?;
    log::info!("systemd-cryptsetup opens {name}");
    let (luks, uuid) = (Luks::new(&volume.header(), stop), volume.uuid.clone());
    let check = move |key: &base::crypto::Secret| {
        let found = luks.uuid()?;
        if found != uuid {
            let text = |uuid: &Option<Uuid>| uuid.as_ref().map_or("none".into(), Uuid::to_string);
            let place = luks.device().display();
            return Err(Error::Device(format!(
                "{place} has the LUKS2 UUID {}, expected {}",
                text(&found),
                text(&uuid)
            )));
        }
        luks.metadata()?;
        match luks.keyslot(key.expose())? {
            Some(_) => Ok(()),
            None => {
                let place = luks.device().display();
                Err(Error::Key(format!("it opens no keyslot of {place}")))
            }
        }
    };
    let key = broker::key(&volume, Box::new(check), stop)?;
    socket.write_all(key.expose()).map_err(Error::Connection)
}

/// Returns the name of the volume in the address of systemd-cryptsetup's socket.
fn name_of(address: &SocketAddr) -> Result<String, Error> {
    let parts = address.as_abstract_name().and_then(|name| {
        let name = std::str::from_utf8(name).ok()?;
        let (_, rest) = name.split_once('/')?;
        rest.strip_prefix(PURPOSE)?.strip_prefix('/')
    });
    parts.map(str::to_owned).ok_or(Error::Stranger)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_volume_is_named_by_the_socket_of_systemd_cryptsetup() {
        let of = |name: &str| name_of(&SocketAddr::from_abstract_name(name).unwrap());
        assert_eq!(of("ab12/cryptsetup/data").unwrap(), "data");
        for other in [
            "",
            "ab12",
            "ab12/cryptsetup",
            "ab12/cryptsetup-tpm2/data",
            "ab12/other/data",
        ] {
            assert!(of(other).is_err(), "{other}");
        }
        let unnamed = UnixStream::pair().unwrap().0.peer_addr().unwrap();
        assert!(name_of(&unnamed).is_err());
    }
}
