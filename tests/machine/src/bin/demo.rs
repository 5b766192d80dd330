//! `make demo`: a virtual machine from power-on to an unlocked disk, as an operator sees it from outside.

use machine::console::Show;
use machine::flow::{self, Setting};
use machine::story::Story;
use machine::timeline;
use std::process::ExitCode;

fn main() -> ExitCode {
    println!(
        "A virtual machine under QEMU, with a TPM by swtpm, and the operator's commands beside it. The cloud's metadata service\n\
         is a small server here. Kubernetes has no part in it: `make test-cluster` makes a real cluster.\n\
         The steps that the machine says come with its own clock; VERBOSE=1 shows all of its console."
    );
    let story = Story::aloud();
    match run(&story) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!(
                "the demo failed: {why}\nThe consoles are in target/boot/; VERBOSE=1 shows them as they come."
            );
            ExitCode::FAILURE
        }
    }
}

fn run(story: &Story) -> machine::Result<()> {
    story.part("0. The machine: its initramfs, and the policy, computed from what it is to boot.");
    let mut setting = Setting::new("demo", 4 << 30)?;
    setting.machine.show = if std::env::var_os("VERBOSE").is_some() {
        Show::Everything
    } else {
        Show::Steps
    };
    let boots = flow::demo(&mut setting, story)?;
    println!(
        "\nThe time of each part, and from the network being up to the disk being open by the machine's clock:"
    );
    print!("{}", story.times());
    for (title, events) in boots {
        match timeline::between(&events, "network-up", "mounted") {
            Some(seconds) => println!("  {seconds:7.1} s  to the open disk: {title}"),
            None => println!("      never  to the open disk: {title}"),
        }
    }
    Ok(())
}
