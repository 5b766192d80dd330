//! Reads lines `FILE-OF-QUOTE FILE-OF-COLLATERAL SECONDS-SINCE-1970` and writes for each the status of the platform, or `refused WHY`.

use std::{fs, io};

use dcap_qvl::QuoteCollateralV3;

fn main() {
    for line in io::stdin().lines() {
        match verdict(&line.expect("a line")) {
            Ok(status) => println!("{status}"),
            Err(why) => println!("refused {}", why.replace('\n', " ")),
        }
    }
}

fn verdict(line: &str) -> Result<String, String> {
    let mut words = line.split(' ');
    let mut word = || words.next().ok_or("a word is missing");
    let quote = fs::read(word()?).map_err(|error| error.to_string())?;
    let collateral = fs::read(word()?).map_err(|error| error.to_string())?;
    let collateral: QuoteCollateralV3 = serde_json::from_slice(&collateral).map_err(|error| error.to_string())?;
    let now = word()?.parse().map_err(|_| "no time")?;
    let report = dcap_qvl::verify::verify(&quote, &collateral, now).map_err(|error| format!("{error:#}"))?;
    Ok(report.status)
}
