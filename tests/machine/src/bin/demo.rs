//! `make demo`: a virtual machine from power-on to an unlocked disk, from outside, the way an operator does it.

use machine::flow::{self, Setting};
use machine::timeline;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let start = Instant::now();
    println!(
        "Simulated here: the cloud's metadata service (a small server) and the hardware (QEMU, swtpm). There is no Kubernetes yet."
    );
    let tell = |text: &str| println!("[{:6.1} s] {text}", start.elapsed().as_secs_f64());
    let result = Setting::new("demo", 4 << 30).and_then(|mut setting| {
        setting.machine.show_console = std::env::var_os("VERBOSE").map(|_| "    | ".to_owned());
        flow::demo(&mut setting, &tell)
    });
    match result {
        Ok(boots) => {
            boots.iter().for_each(|(title, events)| println!("\n{}", timeline::table(title, events)));
            println!("All of it was seen from inside the machine, in {:.0} s.", start.elapsed().as_secs_f64());
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("the demo failed: {why}\nThe consoles are in target/boot/; VERBOSE=1 shows them as they come.");
            ExitCode::FAILURE
        }
    }
}
