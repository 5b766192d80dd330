//! The demo's own output: the events as they happen, and at the end the duration of each part.

use std::cell::RefCell;
use std::time::{Duration, Instant};

/// The boot tests run the demo without output.
pub struct Story {
    start: Instant,
    aloud: bool,
    parts: RefCell<Vec<(String, Duration)>>,
}

impl Story {
    /// Prints on standard output.
    pub fn aloud() -> Story {
        Story {
            start: Instant::now(),
            aloud: true,
            parts: RefCell::default(),
        }
    }

    /// Prints nothing.
    pub fn silent() -> Story {
        Story {
            aloud: false,
            ..Story::aloud()
        }
    }

    /// Begins a part; its time ends with the next part.
    pub fn part(&self, title: &str) {
        if self.aloud {
            println!("\n{title}");
        }
        self.parts
            .borrow_mut()
            .push((title.to_owned(), self.start.elapsed()));
    }

    /// Prints an event, or the beginning of a long step. Further lines are indented below the first.
    pub fn tell(&self, text: &str) {
        if self.aloud {
            let text = text.trim_end().replace('\n', "\n             ");
            println!("  [{:6.1} s] {text}", self.start.elapsed().as_secs_f64());
        }
    }

    /// Prints the duration of each part and of all parts.
    pub fn times(&self) -> String {
        let parts = self.parts.borrow();
        let all = self.start.elapsed();
        let ends = parts.iter().skip(1).map(|(_, start)| *start).chain([all]);
        let line =
            |title: &str, took: Duration| format!("  {:7.1} s  {title}\n", took.as_secs_f64());
        let lines = parts
            .iter()
            .zip(ends)
            .map(|((title, start), end)| line(title, end - *start));
        lines.chain([line("together", all)]).collect()
    }
}
