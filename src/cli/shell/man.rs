//! `firstlight man`: the manual page, made from the same declarations as `--help`.

use std::io::Write;

use clap::{Args, Command};
use clap_mangen::Man;

use crate::shell::{error::Error, output::say_all};

/// Date of the page's last change; a constant, because the page must not differ between builds.
const DATE: &str = "2026-11-30";

/// Print the manual page
///
/// The output has the format man(7).
#[derive(Args)]
#[command(after_help = "Example:\n  firstlight man > firstlight.1 && man ./firstlight.1")]
pub struct Options {}

/// Runs the command.
pub fn run(program: Command) -> Result<(), Error> {
    let page = page(program).map_err(Error::failed)?;
    say_all(&String::from_utf8_lossy(&page))
}

/// Returns the page of the program, with a section for each command.
fn page(mut program: Command) -> Result<Vec<u8>, std::io::Error> {
    program.build();
    let mut page = vec![];
    let man = Man::new(program.clone()).date(DATE);
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    render(&man, &mut page)?;
    for command in program.get_subcommands() {
        let mut section = vec![];
        render(&Man::new(command.clone()), &mut section)?;
        let section = String::from_utf8_lossy(&section).replace("\n.SH ", "\n.SS ");
        let section = section.trim_start_matches(|c| c != '\n');
        writeln!(
            page,
            ".SH FIRSTLIGHT {}{section}",
            command.get_name().to_uppercase()
        )?;
    }
    Ok(page)
}

fn render(man: &Man, page: &mut Vec<u8>) -> Result<(), std::io::Error> {
    man.render_synopsis_section(page)?;
    man.render_description_section(page)?;
    man.render_options_section(page)?;
    man.render_extra_section(page)
}
