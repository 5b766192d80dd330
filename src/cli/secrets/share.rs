//! `firstlight share`: splits the master secret into shares for several people; some of them
//! together can recover the cluster.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use qrcodegen::{QrCode, QrCodeEcc};
use serde_json::json;
use zeroize::Zeroizing;

use crate::shell::{
    error::Error,
    files::{self, FileError},
    output::{Output, say_all},
};
use crate::workspace::{
    master_secret::SecretOptions,
    shares::{self, Share},
};
use clap::Args;

/// Divide the master secret among several people
///
/// Writes a small text file for each person. As many of them as --threshold restore the master secret together, and
/// fewer learn nothing about it (Shamir's scheme, as HashiCorp Vault has it). A share can be copied by hand: its code
/// has digits and letters that are hard to confuse, and a check.
///
/// The commands that read the master secret take shares in its place: --share FILE for each, and --share - to type
/// them. Then a single file is no longer enough. Shares of different runs do not fit together, and those of earlier
/// runs stay valid.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight share --threshold 3 --shares 5 --out /media/safe/shares
  firstlight share --threshold 2 --shares 3 --share alice.txt --share bob.txt --share carol.txt --qr")]
pub struct Options {
    /// How many shares restore the secret, at least 2
    #[arg(long, value_name = "NUMBER")]
    threshold: u8,
    /// How many shares are made, at most 255
    #[arg(long, value_name = "NUMBER")]
    shares: u8,
    #[command(flatten)]
    secret: SecretOptions,
    /// The folder for the files share-1-of-5.txt and so on, none of which may exist; it is made if it is missing
    #[arg(long, value_name = "FILE", default_value = "firstlight-shares")]
    out: PathBuf,
    /// Also print each share as a QR code
    #[arg(long)]
    qr: bool,
    #[command(flatten)]
    output: Output,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let &Options {
        threshold,
        shares: count,
        ..
    } = options;
    if options.output == Output::Json && options.qr {
        return Err(Error::Usage(
            "--qr draws for people, and -o json prints for programs: give one of them".into(),
        ));
    }
    let kms = options.secret.source().read()?;
    let shares = shares::split(&kms, threshold, count)?;
    make_folder(options)?;
    let mut written = vec![];
    for share in &shares {
        let name = format!("share-{}-of-{count}.txt", share.number);
        let path = options.out.join(name);
        files::create_private(&path, text(share, count).as_bytes())?;
        options.output.say(path.display())?;
        written.push(json!({"number": share.number, "file": path}));
        if options.qr {
            say_all(&qr(share)?)?;
        }
    }
    options
        .output
        .json(&json!({"threshold": threshold, "count": count, "shares": written}))?;
    options.output.say(format_args!(
        "Any {threshold} of these {count} files restore the master secret, and fewer reveal nothing about it.\n\
         Give each to another person, try `firstlight recover --share`, and then destroy these copies and the file of the master secret."
    ))
}

fn make_folder(options: &Options) -> Result<(), Error> {
    match DirBuilder::new().mode(0o700).create(&options.out) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(FileError::Io("create", options.out.clone(), error).into())
        }
        _ => Ok(()),
    }
}

/// Returns the file of a share.
fn text(share: &Share, count: u8) -> Zeroizing<String> {
    let hex = |bytes: [u8; 4]| format!("{:08x}", u32::from_be_bytes(bytes));
    Zeroizing::new(format!(
        "Firstlight: a share of a cluster's master secret. Keep it secret.\n\
         Share: {} of {count}; any {} restore the master secret\n\
         Master secret (fingerprint): {}\n\
         Set: {}\n\
         Use: firstlight recover --share FILE --share FILE .., or --share - to type the code\n\
         \n\
         {}\n",
        share.number,
        share.threshold,
        hex(share.fingerprint),
        hex(share.set),
        *shares::lines(share)
    ))
}

/// Returns the share's code as a QR code for a terminal with a dark background: each line has two
/// rows of modules, and the margin is four modules (ISO/IEC 18004).
fn qr(share: &Share) -> Result<Zeroizing<String>, Error> {
    const MARGIN: i32 = 4;
    let qr = QrCode::encode_text(&shares::code(share), QrCodeEcc::Medium).map_err(|_| {
        Error::failed("the share is too long for a QR code: repeat the command without --qr, in another folder")
    })?;
    let is_light = |x, y| !qr.get_module(x, y);
    let side = qr.size() + 2 * MARGIN;
    let mut text = Zeroizing::new(String::with_capacity((side * (side + 1) * 3) as usize));
    for y in (-MARGIN..qr.size() + MARGIN).step_by(2) {
        for x in -MARGIN..qr.size() + MARGIN {
            text.push(match (is_light(x, y), is_light(x, y + 1)) {
                (true, true) => '█',
                (true, false) => '▀',
                (false, true) => '▄',
                (false, false) => ' ',
            });
        }
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::crypto::Secret;
    use base::master_secret::MasterSecret;

    fn shares() -> Vec<Share> {
        let kms = MasterSecret::new(Secret::new(vec![1; 32]), Secret::new(vec![2; 32])).unwrap();
        shares::split(&kms, 2, 3).unwrap()
    }

    #[test]
    fn a_file_is_a_share_and_says_what_it_is() {
        for share in shares() {
            let text = text(&share, 3);
            assert_eq!(shares::parse(text.as_bytes()).unwrap(), share);
            assert!(text.contains(&format!("Share: {} of 3; any 2", share.number)));
        }
    }

    /// Converts the terminal's characters to an image as a camera would see it, with eight pixels
    /// for each module.
    #[test]
    fn a_reader_of_qr_codes_reads_the_share() {
        const PIXELS: usize = 8;
        let share = &shares()[1];
        let drawn = qr(share).unwrap();
        let rows: Vec<Vec<char>> = drawn.lines().map(|line| line.chars().collect()).collect();
        let brightness = |x: usize, y: usize| {
            let (column, row) = (x / PIXELS, y / PIXELS);
            let is_light = matches!(
                (rows[row / 2][column], row % 2),
                ('█', _) | ('▀', 0) | ('▄', 1)
            );
            if is_light { 255 } else { 0 }
        };
        let (width, height) = (rows[0].len() * PIXELS, rows.len() * 2 * PIXELS);
        let mut image = rqrr::PreparedImage::prepare_from_greyscale(width, height, brightness);
        let (_, read) = image.detect_grids()[0].decode().unwrap();
        assert_eq!(shares::parse(read.as_bytes()).unwrap(), *share);
    }
}
