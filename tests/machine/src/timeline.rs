//! The steps of a boot, from the lines `firstlight[stage] 1.23s event: text` that `initramfs/init`, `unlock` and `bootstrapper`
//! print on the console.

use super::console::Line;
use std::fmt;

/// One step, as the machine printed it.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The stage that printed it: `init`, `unlock` or `run`.
    pub stage: String,
    /// Seconds since the kernel started, by the machine's own clock.
    pub at: f64,
    /// Its name, such as `network-up` or `mapped`.
    pub name: String,
    /// The text after the name; may be empty.
    pub text: String,
}

/// The machine's clock, the step.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Event {
            stage,
            at,
            name,
            text,
        } = self;
        write!(
            f,
            "{at:7.2} s  {stage:6}  {name}{}{text}",
            if text.is_empty() { "" } else { ": " }
        )
    }
}

/// Reads a line of the console, also with systemd's prefix `[   30.378931] unlock[230]: `; `None` for any other line.
pub fn parse(line: &str) -> Option<Event> {
    let line = line.split_once("]: ").map_or(line, |(prefix, rest)| {
        let is_prefix = prefix.starts_with('[') && rest.starts_with("firstlight[");
        if is_prefix { rest } else { line }
    });
    let (stage, rest) = line.strip_prefix("firstlight[")?.split_once(']')?;
    let (at, rest) = rest.trim_start().split_once("s ")?;
    let (name, text) = rest
        .trim_start()
        .split_once(": ")
        .unwrap_or((rest.trim(), ""));
    let is_name = !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'-');
    let is_stage = matches!(stage, "init" | "unlock" | "run");
    (is_name && is_stage).then_some(Event {
        stage: stage.to_owned(),
        at: at.parse().ok()?,
        name: name.to_owned(),
        text: text.to_owned(),
    })
}

/// The steps of a boot, in the order of the console.
pub fn events(console: &[Line]) -> Vec<Event> {
    console
        .iter()
        .filter_map(|line| parse(&line.text))
        .collect()
}

/// Seconds from one step to a later one.
pub fn between(events: &[Event], first: &str, last: &str) -> Option<f64> {
    let at = |name: &str| {
        events
            .iter()
            .find(|event| event.name == name)
            .map(|event| event.at)
    };
    Some(at(last)? - at(first)?)
}

#[test]
fn a_line_of_the_bootstrapper_is_a_step() {
    let event =
        parse("firstlight[unlock]    3.214s key-slot: opened by the ticket: slot 0").unwrap();
    assert_eq!(
        (event.stage.as_str(), event.at, event.name.as_str()),
        ("unlock", 3.214, "key-slot")
    );
    assert_eq!(event.text, "opened by the ticket: slot 0");
    assert_eq!(parse("firstlight[init] 1.72s start").unwrap().text, "");
    let prefixed = parse("[   30.378931] unlock[230]: firstlight[unlock]   30.295s start: x");
    assert_eq!(prefixed.unwrap().at, 30.295);
}

#[test]
fn other_lines_are_no_steps() {
    for line in [
        "",
        "firstlight",
        "firstlight[x] 1s a",
        "firstlight[run] s a",
        "firstlight[run] 1.0s A B",
        "[ 1.0] usb",
    ] {
        assert_eq!(parse(line), None, "{line}");
    }
}
