//! Answers systemd-cryptsetup, which reads the key of a volume from a socket (crypttab(5), "key
//! acquisition via AF_UNIX sockets"): the name of its own socket says which volume it opens.

use std::fs;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;

use base::stop::Stop;

use super::broker;
use super::cryptsetup::Luks;
use super::error::Error;
use super::settings::{self, Folders, Volume};

/// What is between the random part and the volume's name in the name of systemd-cryptsetup's socket.
const PURPOSE: &str = "cryptsetup";

/// Answers the connection on the standard input, which systemd has accepted. The key goes to the
/// other end only if it opens the copy of the header that [`copy_header`] has checked.
pub fn run(folders: &Folders, stop: &Stop) -> Result<(), Error> {
    let socket = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(Error::Connection)?;
    let mut socket = UnixStream::from(socket);
    let name = name_of(&socket.peer_addr().map_err(Error::Connection)?)?;
    let volume = Volume::read(&folders.volumes, &name)?;
    log::info!("systemd-cryptsetup asks for the key of {name}");
    let header = folders.header(&name);
    if !header.exists() {
        let header = header.display();
        return Err(Error::Device(format!(
            "there is no {header}, a checked copy of the header: the journal of systemd-cryptsetup@{name} says why"
        )));
    }
    let (luks, place) = (Luks::new(&header, stop), volume.header());
    let check = move |key: &base::crypto::Secret| match luks.keyslot(key.expose())? {
        Some(_) => Ok(()),
        None => {
            let place = place.display();
            Err(Error::Key(format!("it opens no keyslot of {place}")))
        }
    };
    let key = broker::key(&volume, Box::new(check), stop)?;
    socket.write_all(key.expose()).map_err(Error::Connection)
}

/// Makes and checks the copy of the header that systemd-cryptsetup reads. The host could show systemd-cryptsetup
/// another header than the one that this program has checked. Does nothing for a volume without settings.
pub fn copy_header(
    folders: &Folders,
    name: &str,
    crypttab: &Path,
    stop: &Stop,
) -> Result<(), Error> {
    if settings::check_name(name).is_err() || !folders.volumes.join(name).exists() {
        return Ok(());
    }
    let volume = Volume::read(&folders.volumes, name)?;
    let header = folders.header(name);
    check_crypttab(folders, name, crypttab).inspect_err(|_| {
        // systemd-cryptsetup would not read it
        let _ = fs::remove_file(&header);
    })?;
    let uuid = volume.uuid.as_ref().expect("Volume::read checks it");
    Luks::new(&volume.header(), stop)
        .copy(&header, uuid)
        .map(drop)
}

/// Fails if systemd-cryptsetup would read the header of the device.
pub fn check_crypttab(folders: &Folders, name: &str, crypttab: &Path) -> Result<(), Error> {
    let failed = |error| Error::File(crypttab.into(), error);
    let table = fs::read_to_string(crypttab).map_err(failed)?;
    let option = folders.header_option(name);
    if has_option(&table, name, &option) {
        Ok(())
    } else {
        let text = format!("expected a line for {name} with the option {option}");
        Err(Error::Line(crypttab.into(), Box::new(Error::Setting(text))))
    }
}

/// Returns whether the line of a volume in crypttab(5) has this option.
pub fn has_option(table: &str, name: &str, option: &str) -> bool {
    let mut lines = table.lines().map(str::split_ascii_whitespace);
    let line = lines.find_map(|mut line| (line.next() == Some(name)).then_some(line));
    let options = line.and_then(|mut line| line.nth(2));
    options.is_some_and(|options| options.split(',').any(|it| it == option))
}

/// Returns the name of the volume in the address of systemd-cryptsetup's socket.
pub fn name_of(address: &SocketAddr) -> Result<String, Error> {
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
    use support::mutation::mutations;

    #[test]
    fn the_option_counts_only_in_the_line_of_the_volume() {
        let table = "# data x y header=/h\nroot a b header=/h\n data UUID=1 /socket luks,header=/h,nofail\n";
        assert!(has_option(table, "data", "header=/h"));
        for (name, option) in [
            ("data", "header=/"),
            ("data", "header=/h2"),
            ("other", "header=/h"),
        ] {
            assert!(!has_option(table, name, option), "{name} {option}");
        }
        assert!(!has_option("data UUID=1 header=/h\n", "data", "header=/h"));
        for bytes in mutations(table.as_bytes(), 20_000) {
            has_option(&String::from_utf8_lossy(&bytes), "data", "header=/h");
        }
    }

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
        for bytes in mutations(b"ab12/cryptsetup/data", 20_000) {
            // an abstract name has at most 107 bytes
            if let Ok(address) = SocketAddr::from_abstract_name(&bytes) {
                let _ = name_of(&address);
            }
        }
        let unnamed = UnixStream::pair().unwrap().0.peer_addr().unwrap();
        assert!(name_of(&unnamed).is_err());
    }
}
