//! docs/clouds/azure.md and openstack.md: the clients' own parsers read each command. The script of this folder with the client's name
//! loads the client, and stops it where it would send a request. docs/clouds/gcp.md: there is no client, a script takes its place.

use std::path::Path;
use std::process::Command;

use support::ROOT;

use super::infra;
use super::work::Work;

/// Runs a page with the client in place of the program; returns the folder.
fn read(page: &str, program: &str) -> Work {
    let interpreter = super::client(page).join("python");
    read_by(page, program, &interpreter)
}

fn read_by(page: &str, program: &str, interpreter: &Path) -> Work {
    let work = Work::new();
    let script = format!(
        "#!/bin/sh\nexec {} {ROOT}/tests/cloud_pages/{program} \"$@\"\n",
        interpreter.display()
    );
    work.program(program, &script);
    // in place of the address of Azure's console `az` prints the console
    work.program("curl", "#!/bin/bash\necho \"${@: -1}\"\n");
    // the blocks that ask for the operator's address are not run
    let mut run = work.start(
        page,
        "OPERATORS=203.0.113.7/32",
        Path::new("/none"),
        Command::new("bash"),
    );
    run.until_tear_down();
    run.end();
    drop(run);
    work
}

#[test]
#[ignore = "needs clients from the package index, and Helm: make cloud-pages"]
fn the_page_of_azure_has_only_commands_that_az_knows() {
    let work = read("azure", "az");
    work.check_init("network-public-ip-firstlight-");
    infra::azure::check(&work);
}

#[test]
#[ignore = "needs clients from the package index, and Helm: make cloud-pages"]
fn the_page_of_openstack_has_only_commands_that_its_client_knows() {
    let work = read("openstack", "openstack");
    work.check_init("openstack-result");
    // the user data of workers has no credentials
    assert!(work.read("control-plane.json").contains("openstack-secret"));
    assert!(!work.read("worker.json").contains("credential"));
    infra::openstack::check(&work);
}

#[test]
#[ignore = "needs Helm and OpenTofu: make cloud-pages"]
fn the_page_of_gcp_runs_with_a_script_in_place_of_gcloud() {
    let work = read_by("gcp", "gcloud", Path::new("python3"));
    // nobody listens at the end of the tunnel
    let said = work.read("init.txt");
    assert!(said.contains("waiting for 127.0.0.1:9000"), "{said}");
    infra::gcp::check(&work);
}
