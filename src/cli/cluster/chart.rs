//! Draws the steps of a boot: bars of text for a terminal, and an SVG picture for a report.

use std::fmt::Write;

/// Minimum columns of a chart.
const MIN_COLUMNS: usize = 60;
/// Minimum columns of a time.
const MIN_DIGITS: usize = 8;
/// Columns of a row that are not part of a time, a bar or a name.
const SPACES: usize = 9;
/// Maximum share of a chart for one wait for another machine or person, relative to all other
/// steps: so the work next to it stays visible.
const WAIT_SHARE: f64 = 0.25;

/// A part of a boot.
#[derive(Debug, Clone, PartialEq)]
pub struct BootPart {
    /// The program that ran, or was about to start.
    pub stage: &'static str,
    /// What was done.
    pub what: String,
    /// Seconds since the kernel's start.
    pub from: f64,
    /// Seconds since the kernel's start.
    pub to: f64,
    /// Whether the machine waited for another machine or a person.
    pub is_wait: bool,
}

impl BootPart {
    /// Returns the step's length in seconds.
    pub fn took(&self) -> f64 {
        self.to - self.from
    }
}

/// Start and end of each step's bar, as fractions of the chart's width.
struct Scale(Vec<(f64, f64)>);

impl Scale {
    fn of(steps: &[BootPart]) -> Scale {
        let work: f64 = (steps.iter().filter(|step| !step.is_wait))
            .map(BootPart::took)
            .sum();
        let longest = if work > 0.0 {
            work * WAIT_SHARE
        } else {
            f64::MAX
        };
        let drawn = |step: &BootPart| {
            if step.is_wait {
                step.took().min(longest)
            } else {
                step.took()
            }
        };
        // all steps are at the same time, so no width is needed
        let all = steps.iter().map(drawn).sum::<f64>().max(f64::MIN_POSITIVE);
        let mut at = 0.0;
        let bars = steps.iter().map(|step| {
            let from = at;
            at += drawn(step);
            (from / all, at / all)
        });
        Scale(bars.collect())
    }
}

/// Returns the chart as lines of at most `columns` ASCII characters: when a step ended, how long it
/// took, a bar, its name.
pub fn text(steps: &[BootPart], columns: usize) -> String {
    let digits = steps.iter().map(|step| format!("{:.3}", step.to).len());
    let digits = digits.max().unwrap_or_default().max(MIN_DIGITS);
    let columns = columns.max(MIN_COLUMNS) - 2 * digits - SPACES;
    let longest = steps.iter().map(|step| label(step).len()).max();
    let labels = longest.unwrap_or_default().min(columns / 2);
    let bars = columns - labels;
    let mut chart = format!("{:>digits$}   {:>digits$}\n", "ended at", "took");
    for (step, (from, to)) in steps.iter().zip(Scale::of(steps).0) {
        let first = ((from * bars as f64) as usize).min(bars - 1);
        let end = ((to * bars as f64).round() as usize).clamp(first + 1, bars);
        let fill = if step.is_wait { "." } else { "#" };
        let bar = format!("{}{}", " ".repeat(first), fill.repeat(end - first));
        // writing to a string does not fail
        let _ = write!(
            chart,
            "{:>digits$.3} s {:>digits$.3} s  ",
            step.to,
            step.took()
        );
        let line = format!("{bar:bars$}  {:.labels$}", label(step));
        let _ = writeln!(chart, "{}", line.trim_end());
    }
    if steps.iter().any(|step| step.is_wait) {
        chart.push_str("....: waits for a key, a cluster or an operator, cut short\n");
    }
    chart
}

fn label(step: &BootPart) -> String {
    format!("{:6} {}", step.stage, step.what)
}

/// Width of the picture and of the columns before and after the bars, and height of a row, in
/// pixels.
const PICTURE: usize = 1200;
const BEFORE: usize = 170;
const AFTER: usize = 470;
const ROW: usize = 20;

/// Returns the chart as an SVG picture.
pub fn svg(steps: &[BootPart]) -> String {
    let height = ROW * (steps.len() + 2);
    let mut picture = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {PICTURE} {height}\" font-family=\"monospace\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"80\" y=\"15\" text-anchor=\"end\">ended at</text>\
         <text x=\"160\" y=\"15\" text-anchor=\"end\">took</text>\n"
    );
    let width = (PICTURE - BEFORE - AFTER) as f64;
    for (row, (step, (from, to))) in steps.iter().zip(Scale::of(steps).0).enumerate() {
        let top = ROW * (row + 1);
        let colour = match (step.is_wait, step.stage) {
            (true, _) => "#cccccc",
            (_, "run") => "#2a7f62",
            _ => "#2e6fbb",
        };
        let (left, length) = (BEFORE as f64 + from * width, ((to - from) * width).max(1.0));
        // writing to a string does not fail
        let _ = writeln!(
            picture,
            "<text x=\"80\" y=\"{base}\" text-anchor=\"end\">{:.3} s</text>\
             <text x=\"160\" y=\"{base}\" text-anchor=\"end\">{:.3} s</text>\
             <rect x=\"{left:.1}\" y=\"{}\" width=\"{length:.1}\" height=\"{}\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"{base}\" xml:space=\"preserve\">{}</text>",
            step.to,
            step.took(),
            top + 3,
            ROW - 6,
            PICTURE - AFTER + 10,
            escaped(&label(step)),
            base = top + 15,
        );
    }
    let note = "grey: waits for a key, a cluster or an operator, cut short";
    let _ = writeln!(
        picture,
        "<text x=\"{BEFORE}\" y=\"{}\" fill=\"#666666\">{note}</text>\n</svg>",
        ROW * (steps.len() + 1) + 15
    );
    picture
}

/// Escapes the characters that have a meaning in XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(what: &str, from: f64, to: f64, is_wait: bool) -> BootPart {
        BootPart {
            stage: "run",
            what: what.into(),
            from,
            to,
            is_wait,
        }
    }

    #[test]
    fn bars_follow_each_other_and_a_long_wait_leaves_room_for_the_work() {
        let steps = [
            step("start", 0.0, 2.0, false),
            step("locked", 2.0, 3602.0, true),
            step("phase: kubeadm init & <more>", 3602.0, 3604.0, false),
        ];
        assert_eq!(
            text(&steps, 80),
            "\
ended at       took
   2.000 s    2.000 s  ###########                   run    start
3602.000 s 3600.000 s             ......             run    locked
3604.000 s    2.000 s                  ############  run    phase: kubeadm init
....: waits for a key, a cluster or an operator, cut short
"
        );
        let picture = svg(&steps);
        assert!(
            picture.contains("kubeadm init &amp; &lt;more&gt;</text>"),
            "{picture}"
        );
    }

    #[test]
    fn steps_at_one_instant_have_bars_too() {
        let chart = text(&[step("a", 0.0, 0.0, false), step("b", 0.0, 0.0, true)], 60);
        assert_eq!(chart.matches('#').count(), 1, "{chart}");
        assert_eq!(
            chart.lines().filter(|line| line.contains(" .")).count(),
            1,
            "{chart}"
        );
    }
}
