//! The cloud enlarges the state disk of a member: the next boot maps all of it.

use machine::Result;
use machine::case::Case;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A disk that grows, one that was only shown larger, and a forged superblock are mapped at the size that they have.
#[test]
#[ignore = "boots a machine: make boot"]
fn a_disk_is_mapped_at_its_present_size() -> Result<()> {
    let case = Case {
        script: "grow.sh",
        host_programs: &["dmsetup"],
        files: vec![(
            "/usr/bin/dm_guest".to_owned(),
            machine::example("dm_guest")?,
        )],
        disks: &[("disk1", 1024 * MIB)],
        limit: Duration::from_secs(600),
        ..Case::default()
    };
    println!("passed:\n  {}", case.run()?.join("\n  "));
    Ok(())
}
