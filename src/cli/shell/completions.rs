//! `firstlight completions`: completions of our command lines for shells, made from the same tables
//! as `--help`.

use crate::shell::{
    error::Error,
    usage::{Command, FILE, Given, HELP, Operand, Program, VERSION},
};

/// The supported shells.
pub const SHELLS: &[&str] = &["bash", "zsh", "fish"];

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "completions",
    summary: "print the completions of these commands for a shell",
    about: &["The running shell can read the output at once, or from a file when it starts."],
    operand: Some(Operand {
        value: "SHELL",
        words: SHELLS,
        is_needed: true,
        help: "bash, zsh or fish",
    }),
    options: &[],
    examples: &[
        "source <(firstlight completions bash)",
        "firstlight completions zsh > ~/.zfunc/_firstlight",
        "firstlight completions fish > ~/.config/fish/completions/firstlight.fish",
    ],
    run: |given| run(given.program(), given),
};

/// Runs the command.
pub fn run(program: &Program, given: &Given) -> Result<(), Error> {
    let shell = given.operand()?;
    crate::shell::output::say_all(&match shell.as_str() {
        "bash" => bash(program),
        "zsh" => zsh(program),
        "fish" => fish(program),
        _ => {
            return Err(Error::Usage(format!(
                "unknown shell {shell:?}: expected {}",
                SHELLS.join(", ")
            )));
        }
    })
}

/// Returns the completions for bash (bash(1), Programmable Completion). It offers no completions
/// for host names and other free texts.
fn bash(program: &Program) -> String {
    let name = program.name;
    let commands: Vec<&str> = program
        .commands
        .iter()
        .map(|command| command.name)
        .collect();
    let (mut values, mut words) = (String::new(), String::new());
    for command in program.commands {
        for option in command.all_options() {
            let answer = match (option.value, option.words) {
                ("", _) => continue,
                (FILE, _) => "_files; return".to_owned(),
                (_, []) => "return".to_owned(),
                (_, all) => format!("_words '{}'; return", all.join(" ")),
            };
            let answer = answer.replace('_', &format!("_{name}_"));
            let short = option
                .short
                .map(|letter| format!("{}:-{letter}|", command.name));
            values.push_str(&format!(
                "    {}{}:--{}) {answer} ;;\n",
                short.unwrap_or_default(),
                command.name,
                option.name
            ));
        }
        let short = command.all_options().filter_map(|option| option.short);
        let mut all: Vec<String> = command
            .all_options()
            .map(|option| format!("--{}", option.name))
            .chain(short.map(|letter| format!("-{letter}")))
            .collect();
        let operand = command.operand.iter();
        all.extend(operand.flat_map(|it| it.words).map(|it| (*it).to_owned()));
        if let Some(operand) = command
            .operand
            .as_ref()
            .filter(|it| it.is_action() && !it.words.is_empty())
        {
            let actions = operand.words.iter();
            let actions = actions.map(|word| format!("{}:{word}", command.name));
            let actions: Vec<_> = actions.collect();
            values.push_str(&format!(
                "    {}) _{name}_files; return ;;\n",
                actions.join("|")
            ));
        }
        words.push_str(&format!(
            "    {}) _{name}_words '{}' ;;\n",
            command.name,
            all.join(" ")
        ));
    }
    format!(
        "\
# Completions of {name} for bash: source <({name} completions bash)
_{name}_words() {{ mapfile -t COMPREPLY < <(compgen -W \"$1\" -- \"${{COMP_WORDS[COMP_CWORD]}}\"); }}
_{name}_files() {{ compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- \"${{COMP_WORDS[COMP_CWORD]}}\"); }}
_{name}() {{
  COMPREPLY=()
  if [ \"$COMP_CWORD\" = 1 ]; then
    _{name}_words '{} help --help --version -h -V'
    return
  fi
  case ${{COMP_WORDS[1]}}:${{COMP_WORDS[COMP_CWORD-1]}} in
{values}  esac
  case ${{COMP_WORDS[1]}} in
{words}  esac
}}
complete -F _{name} {name}
",
        commands.join(" ")
    )
}

/// Returns the completions for zsh (zshcompsys(1)): `_arguments` with one specification for each
/// option.
fn zsh(program: &Program) -> String {
    let name = program.name;
    let quoted = |text: &str| text.replace('\'', "'\\''");
    // these characters would end a description
    let plain = |text: &str| {
        quoted(text)
            .replace('[', "\\[")
            .replace(']', "\\]")
            .replace(':', "\\:")
    };
    let action = |value: &str, words: &[&str]| match (value, words) {
        ("", _) => String::new(),
        (FILE, _) => format!(":{FILE}:_files"),
        (text, []) => format!(":{}: ", plain(text)),
        (text, all) => format!(":{}:({})", plain(text), all.join(" ")),
    };
    let (mut commands, mut cases) = (String::new(), String::new());
    for command in program.commands {
        commands.push_str(&format!(
            "    '{}:{}'\n",
            command.name,
            plain(command.summary)
        ));
        let mut specs = vec![];
        for option in command.all_options() {
            let value = action(option.value, option.words);
            let description = format!("[{}]{value}", plain(option.help));
            specs.extend(
                option
                    .short
                    .map(|letter| format!("'-{letter}{description}'")),
            );
            specs.push(format!("'--{}{description}'", option.name));
        }
        // if the operand could be any text, zsh would not complete options at this position
        let operand = command.operand.as_ref();
        let operand = operand.filter(|it| it.value == FILE || !it.words.is_empty());
        specs.extend(operand.map(|it| format!("'1{}'", action(it.value, it.words))));
        if operand.is_some_and(Operand::is_action) {
            specs.push("'*:FILE:_files'".to_owned());
        }
        cases.push_str(&format!(
            "    {}) _arguments {} ;;\n",
            command.name,
            specs.join(" ")
        ));
    }
    format!(
        "\
#compdef {name}
# Completions of {name} for zsh: source <({name} completions zsh), or as _{name} in a folder of $fpath
_{name}() {{
  local -a commands=(
{commands}  )
  if (( CURRENT == 2 )); then
    _describe -t commands command commands
    _arguments '--help[{}]' '--version[{}]'
    return
  fi
  local command=$words[2]
  shift words
  (( CURRENT-- ))
  case $command in
{cases}  esac
}}
if [ \"$funcstack[1]\" = _{name} ]; then _{name} \"$@\"; else compdef _{name} {name}; fi
",
        plain(HELP.help),
        plain(VERSION.help)
    )
}

/// Returns the completions for fish (fish(1), complete).
fn fish(program: &Program) -> String {
    let name = program.name;
    let quoted = |text: &str| format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
    let mut text = format!(
        "# Completions of {name} for fish: {name} completions fish | source\n\
         complete -c {name} -f\n\
         complete -c {name} -n __fish_use_subcommand -l help -d {}\n\
         complete -c {name} -n __fish_use_subcommand -l version -d {}\n",
        quoted(HELP.help),
        quoted(VERSION.help)
    );
    for command in program.commands {
        text.push_str(&format!(
            "complete -c {name} -n __fish_use_subcommand -a {} -d {}\n",
            command.name,
            quoted(command.summary)
        ));
        let only = format!(
            "complete -c {name} -n '__fish_seen_subcommand_from {}'",
            command.name
        );
        for option in command.all_options() {
            let value = match (option.value, option.words) {
                ("", _) => String::new(),
                (FILE, _) => " -r -F".to_owned(),
                (_, []) => " -x".to_owned(),
                (_, all) => format!(" -x -a {}", quoted(&all.join(" "))),
            };
            let short = option
                .short
                .map(|letter| format!(" -s {letter}"))
                .unwrap_or_default();
            text.push_str(&format!(
                "{only}{short} -l {}{value} -d {}\n",
                option.name,
                quoted(option.help)
            ));
        }
        let words = command.operand.as_ref().map_or(&[][..], |it| it.words);
        if !words.is_empty() {
            text.push_str(&format!("{only} -a {}\n", quoted(&words.join(" "))));
        }
    }
    text
}
