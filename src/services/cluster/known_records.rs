//! The records of machines, as the watch has delivered them or a ticket has written them. A ticket
//! asks for those of one disk, machine, token or address. Each is found without a look at all
//! others, because a large cluster has tens of thousands.

use std::net::IpAddr;
use std::sync::Arc;

use super::index::Index;
use kubernetes::machine_record::{DISK_RECORD_PREFIX, MachineRecord};

/// The records of machines, with an index of their names, disks, machines, tokens and addresses.
#[derive(Default)]
pub struct KnownRecords {
    /// By their numbers. `None` where a record was removed.
    records: Vec<Option<Arc<MachineRecord>>>,
    /// The numbers that the next records get.
    free: Vec<usize>,
    index: Index,
    /// The number of records of disks.
    of_disks: usize,
}

/// What a record is found by.
#[derive(Hash)]
enum Key<'a> {
    Name(&'a str),
    Disk(&'a str),
    Machine(&'a str),
    Token(&'a str),
    Address(IpAddr),
}

impl KnownRecords {
    /// Stores a record in place of an earlier one of the same name.
    pub fn insert(&mut self, record: MachineRecord) {
        self.remove(&record.name);
        let number = self.free.pop().unwrap_or_else(|| {
            self.records.push(None);
            self.records.len() - 1
        });
        for key in keys(&record) {
            self.index.insert(key, number);
        }
        self.of_disks += usize::from(is_of_disk(&record));
        self.records[number] = Some(Arc::new(record));
    }

    /// Removes the record of this name, if there is one.
    pub fn remove(&mut self, name: &str) {
        let mut found = self.index.with_hash_of(Key::Name(name));
        let number = found.find(|number| {
            let record = self.records[*number].as_ref();
            record.is_some_and(|record| record.name == name)
        });
        drop(found);
        if let Some(number) = number
            && let Some(record) = self.records[number].take()
        {
            self.free.push(number);
            for key in keys(&record) {
                self.index.remove(key, number);
            }
            self.of_disks -= usize::from(is_of_disk(&record));
        }
    }

    /// Returns the record of this name.
    pub fn get(&self, name: &str) -> Option<&Arc<MachineRecord>> {
        let mut found = self.with_hash_of(Key::Name(name));
        found.find(|record| record.name == name)
    }

    /// Returns all records, in any order.
    pub fn all(&self) -> impl Iterator<Item = &Arc<MachineRecord>> {
        self.records.iter().flatten()
    }

    /// Returns the number of records of disks.
    pub fn count_of_disks(&self) -> usize {
        self.of_disks
    }

    /// Returns the records that contain this disk.
    pub fn of_disk(&self, disk: &str) -> impl Iterator<Item = &Arc<MachineRecord>> {
        let found = self.with_hash_of(Key::Disk(disk));
        found.filter(move |record| record.disk == disk)
    }

    /// Returns the records of this machine: of its nodes and of its disks.
    pub fn of_machine(&self, machine: &str) -> impl Iterator<Item = &Arc<MachineRecord>> {
        let found = self.with_hash_of(Key::Machine(machine));
        found.filter(move |record| record.machine == machine)
    }

    /// Returns the record of the ticket with the token of this identifier.
    pub fn of_token(&self, token: &str) -> Option<&Arc<MachineRecord>> {
        let mut found = self.with_hash_of(Key::Token(token));
        found.find(|record| record.token == token)
    }

    /// Returns the records with this address. An IPv4-mapped IPv6 address counts as the IPv4 address.
    pub fn of_address(&self, address: IpAddr) -> impl Iterator<Item = &Arc<MachineRecord>> {
        let found = self.with_hash_of(Key::Address(address.to_canonical()));
        found.filter(move |record| record.has_address(address))
    }

    fn with_hash_of(&self, key: Key) -> impl Iterator<Item = &Arc<MachineRecord>> {
        let numbers = self.index.with_hash_of(key);
        numbers.filter_map(|number| self.records[number].as_ref())
    }
}

fn keys(record: &MachineRecord) -> impl Iterator<Item = Key<'_>> {
    let addresses = record.addresses.iter().map(|own| own.to_canonical());
    let texts = [
        Some(Key::Name(&record.name)),
        (!record.disk.is_empty()).then_some(Key::Disk(&record.disk)),
        (!record.machine.is_empty()).then_some(Key::Machine(&record.machine)),
        (!record.token.is_empty()).then_some(Key::Token(&record.token)),
    ];
    let texts = texts.into_iter().flatten();
    texts.chain(addresses.map(Key::Address))
}

fn is_of_disk(record: &MachineRecord) -> bool {
    record.name.starts_with(DISK_RECORD_PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names<'a>(found: impl IntoIterator<Item = &'a Arc<MachineRecord>>) -> Vec<&'a str> {
        found.into_iter().map(|record| &*record.name).collect()
    }

    #[test]
    fn a_record_is_found_by_each_of_its_keys_until_it_is_gone_or_has_others() {
        let mut records = KnownRecords::default();
        let record = |name: &str, key: &str, addresses: &[&str]| MachineRecord {
            name: name.into(),
            disk: format!("disk {key}"),
            machine: format!("machine {key}"),
            token: format!("token {name} {key}"),
            addresses: addresses.iter().map(|it| it.parse().unwrap()).collect(),
            ..MachineRecord::default()
        };
        records.insert(record("a", "1", &["10.0.0.1", "::ffff:10.0.0.1"]));
        records.insert(record("join-disk-b", "1", &[]));
        records.insert(record("a", "2", &["10.0.0.2", "fd00::2"]));
        let address = |text: &str| -> IpAddr { text.parse().unwrap() };
        assert_eq!(names(records.of_disk("disk 1")), ["join-disk-b"]);
        assert_eq!(names(records.of_disk("disk 2")), ["a"]);
        assert_eq!(names(records.of_machine("machine 1")), ["join-disk-b"]);
        assert_eq!(names(records.of_machine("machine 2")), ["a"]);
        assert_eq!(names(records.of_token("token a 1")), [""; 0]);
        assert_eq!(names(records.of_token("token a 2")), ["a"]);
        assert_eq!(names(records.of_address(address("10.0.0.1"))), [""; 0]);
        for text in ["10.0.0.2", "::ffff:10.0.0.2", "fd00::2"] {
            assert_eq!(names(records.of_address(address(text))), ["a"], "{text}");
        }
        assert_eq!(records.count_of_disks(), 1);
        records.insert(record("join-disk-b", "2", &[]));
        assert_eq!(names(records.of_disk("disk 2")), ["a", "join-disk-b"]);
        assert_eq!(records.count_of_disks(), 1);
        records.remove("a");
        records.remove("join-disk-b");
        records.remove("c");
        assert_eq!(names(records.all()), [""; 0]);
        // numbers of records that are gone are used again
        assert_eq!(records.records.len(), 2);
        assert_eq!(records.count_of_disks(), 0);
        assert!(
            records
                .index
                .with_hash_of(Key::Disk("disk 2"))
                .next()
                .is_none()
        );
    }

    #[test]
    fn records_without_a_value_do_not_share_it() {
        let mut records = KnownRecords::default();
        for name in ["a", "b"] {
            records.insert(MachineRecord {
                name: name.into(),
                ..MachineRecord::default()
            });
        }
        assert_eq!(names(records.of_disk("")), [""; 0]);
        assert_eq!(names(records.of_machine("")), [""; 0]);
        assert_eq!(names(records.of_token("")), [""; 0]);
    }
}
