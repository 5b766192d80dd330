//! docs/clouds/azure.md and openstack.md: the clients' own parsers read each command. The script of this folder with the client's name
//! loads the client, and stops it where it would send a request.

use std::path::Path;
use std::process::Command;

use support::ROOT;

use super::work::Work;

/// Runs a page with the client in place of the program; returns the folder.
fn read(page: &str, program: &str) -> Work {
    let work = Work::new();
    let programs = super::client(page);
    let interpreter = programs.join("python");
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
    read("azure", "az").check_init("az-result");
}

#[test]
#[ignore = "needs clients from the package index, and Helm: make cloud-pages"]
fn the_page_of_openstack_has_only_commands_that_its_client_knows() {
    let work = read("openstack", "openstack");
    work.check_init("openstack-result");
    // the user data of workers has no credentials
    assert!(work.read("control-plane.json").contains("openstack-secret"));
    assert!(!work.read("worker.json").contains("credential"));
}
