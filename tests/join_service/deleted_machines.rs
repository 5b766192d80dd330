//! The records of machines that no longer exist.

use ::services::key_service::disks::Disks;
use ::services::member_controller::deleted_machines::{self, RecordOutcome};
use base::stop::Stop;
use base::uuid::Uuid;
use kubernetes::client::{CONFIG_MAPS, Client};
use kubernetes::machine_record::{self, MachineRecord};
use rpc::grpc::Code;
use services::metrics::Registry;

use crate::setup::*;

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_record_goes_and_the_disk_opens_neither_in_a_machine_nor_as_a_volume() {
    let (_alone, cluster, setup) = Setup::shared();
    let account = Client::new(setup.account(cluster, MEMBER_CONTROLLER), &Stop::new());
    let uuid = Uuid::parse(&disk(77)).unwrap();
    let record = MachineRecord::of_node("gone", &uuid, Some("m"), "", "");
    machine_record::write_if_absent(&setup.admin, &record).unwrap();
    let maps = CONFIG_MAPS.in_namespace("kube-system");

    let earlier = MachineRecord {
        machine: "other".into(),
        ..record.clone()
    };
    let delete = |record| deleted_machines::delete(&account, record, false).unwrap();
    assert_eq!(delete(&earlier), RecordOutcome::Changed);
    assert!(
        setup
            .admin
            .find(&maps.named(&record.name))
            .unwrap()
            .is_some()
    );

    let written = setup.admin.get_as(&maps.named(&record.name)).unwrap();
    let written = MachineRecord::read(&written).unwrap();
    assert_eq!(delete(&written), RecordOutcome::Deleted);
    assert_eq!(setup.admin.find(&maps.named(&record.name)).unwrap(), None);
    let closed = format!("join-disk-{uuid}");
    let map = setup.admin.get(&maps.named(&closed)).unwrap();
    assert_eq!(map["data"]["machine"], "none");
    let disks = Disks::new(&setup.admin, &Registry::new());
    let refused = disks.refuse_state_disk(&uuid).unwrap_err();
    assert!(
        refused.code() == Code::PermissionDenied && refused.to_string().contains(&closed),
        "{refused}"
    );

    // that of a control plane stays until its member of etcd is removed, and so does its disk
    let uuid = Uuid::parse(&disk(78)).unwrap();
    let mut record = MachineRecord::of_node("plane", &uuid, Some("m"), "", "");
    record.control_plane = true;
    machine_record::write_if_absent(&setup.admin, &record).unwrap();
    let written = setup.admin.get_as(&maps.named(&record.name)).unwrap();
    let written = MachineRecord::read(&written).unwrap();
    for _ in 0..2 {
        assert_eq!(delete(&written), RecordOutcome::Kept);
        let kept = setup.admin.get(&maps.named(&record.name)).unwrap();
        assert_eq!(kept["data"]["machine"], "m");
        let closed = setup.admin.find(&maps.named(&format!("join-disk-{uuid}")));
        assert_eq!(closed.unwrap(), None);
    }
}
