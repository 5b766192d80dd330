//! Reads lines `FILE-OF-REPORT FILE-OF-VCEK FILE-OF-ASK FILE-OF-ARK` (DER) and writes for each `accepted`, or `refused WHY`.

use std::{fs, io, panic};

use sev::certs::snp::{Certificate, Chain, Verifiable, ca};
use sev::firmware::guest::AttestationReport;
use sev::parser::ByteParser;

fn main() {
    for line in io::stdin().lines() {
        let line = line.expect("a line");
        match panic::catch_unwind(|| verdict(&line)) {
            Ok(Ok(())) => println!("accepted"),
            Ok(Err(why)) => println!("refused {}", why.to_string().replace('\n', " ")),
            Err(_) => println!("refused by a panic"),
        }
    }
}

fn verdict(line: &str) -> io::Result<()> {
    let files: Vec<_> = line.split(' ').map(fs::read).collect::<Result<_, _>>()?;
    let [report, vek, ask, ark] = files.try_into().expect("four files");
    let (ask, ark) = (Certificate::from_der(&ask)?, Certificate::from_der(&ark)?);
    let vek = Certificate::from_der(&vek)?;
    let chain = Chain { ca: ca::Chain { ark, ask }, vek };
    let report = AttestationReport::from_bytes(&report)?;
    (&chain, &report).verify()
}
