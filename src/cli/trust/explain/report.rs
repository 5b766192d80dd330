//! The report of `firstlight explain`, for people and as JSON.

use std::fmt::Write;

use serde_json::{Value, json};

use super::compare::{Finding, RegisterState};
use super::evidence::Entry;
use base::text::hex;

/// How a text is shown on a terminal (ECMA-48, SGR).
#[derive(Clone, Copy)]
enum Style {
    Bold,
    Faint,
    Red,
    Green,
    Yellow,
}

impl Style {
    fn code(self) -> u8 {
        match self {
            Style::Bold => 1,
            Style::Faint => 2,
            Style::Red => 31,
            Style::Green => 32,
            Style::Yellow => 33,
        }
    }
}

/// Writes styled text, or plain text.
pub struct Pen {
    /// Whether the output is a terminal that shows colours.
    pub has_colour: bool,
}

impl Pen {
    fn paint(&self, style: Style, text: &str) -> String {
        if self.has_colour {
            format!("\x1b[{}m{text}\x1b[0m", style.code())
        } else {
            text.into()
        }
    }
}

/// Returns the report for people: each register with its values and events; a `-` marks the first
/// event that was expected and did not come, a `+` the one that came in its place.
pub fn text(title: &str, findings: &[Finding], pen: &Pen) -> String {
    let mut text = format!("{}\n", pen.paint(Style::Bold, title));
    // writing to a string does not fail
    for finding in findings {
        let style = match finding.verdict {
            RegisterState::Matches | RegisterState::Explained => Style::Green,
            RegisterState::NotInLog => Style::Yellow,
            RegisterState::Differs | RegisterState::Unexplained => Style::Red,
        };
        let name = pen.paint(Style::Bold, &finding.name);
        let verdict = pen.paint(style, finding.verdict.words());
        let _ = writeln!(text, "\n{name}: {verdict}");
        let value = |value: &Option<Vec<u8>>| value.as_deref().map_or("not known".into(), hex);
        if finding.expected.is_some() && finding.verdict != RegisterState::Matches {
            let _ = writeln!(text, "  expected {}", value(&finding.expected));
        }
        let _ = writeln!(text, "  got      {}", value(&finding.got));
        for note in &finding.notes {
            let _ = writeln!(text, "  {note}");
        }
        events(&mut text, finding, pen);
    }
    text
}

fn events(text: &mut String, finding: &Finding, pen: &Pen) {
    let kinds = finding.events.iter().map(|entry| entry.kind.len());
    let width = kinds.max().unwrap_or_default();
    let line = |mark: &str, number: usize, entry: &Entry| {
        let digest: String = hex(&entry.digest).chars().take(8).collect();
        format!(
            "  {mark} {number:3} {digest}.. {:width$} {}",
            entry.kind, entry.what
        )
    };
    let at = finding.difference.as_ref().map(|difference| difference.at);
    for number in 0..=finding.events.len() {
        if let Some(difference) = &finding.difference
            && difference.at == number
        {
            let shown = match &difference.expected {
                Some(entry) => line("-", number, entry),
                None => format!("  - {number:3} no further event was expected"),
            };
            let _ = writeln!(text, "{}", pen.paint(Style::Green, shown.trim_end()));
            if number == finding.events.len() {
                let shown = format!("  + {number:3} no further event came");
                let _ = writeln!(text, "{}", pen.paint(Style::Red, &shown));
            }
        }
        let Some(entry) = finding.events.get(number) else {
            break;
        };
        let is_first = at == Some(number);
        let shown = line(if is_first { "+" } else { " " }, number, entry);
        let shown = shown.trim_end();
        let _ = match (is_first, at.is_some_and(|at| number < at)) {
            (true, _) => writeln!(text, "{}", pen.paint(Style::Red, shown)),
            (false, true) => writeln!(text, "{}", pen.paint(Style::Faint, shown)),
            (false, false) => writeln!(text, "{shown}"),
        };
    }
}

/// Returns the report for programs.
pub fn json(source: &str, against: &[String], bank: &str, findings: &[Finding]) -> String {
    let entry = |entry: &Entry| {
        json!({
            "type": entry.kind,
            "digest": hex(&entry.digest),
            "description": entry.what,
        })
    };
    let register = |finding: &Finding| -> Value {
        let difference = finding.difference.as_ref().map(|difference| {
            json!({
                "index": difference.at,
                "expected": difference.expected.as_ref().map(entry),
                "got": finding.events.get(difference.at).map(entry),
            })
        });
        json!({
            "name": finding.name,
            "index": finding.number,
            "verdict": finding.verdict.words(),
            "expected": finding.expected.as_deref().map(hex),
            "got": finding.got.as_deref().map(hex),
            "explained": finding.is_explained,
            "notes": finding.notes,
            "events": finding.events.iter().map(entry).collect::<Vec<_>>(),
            "firstDifference": difference,
        })
    };
    let report = json!({
        "source": source,
        "against": against,
        "bank": bank,
        "registers": findings.iter().map(register).collect::<Vec<_>>(),
    });
    format!("{report:#}\n")
}
