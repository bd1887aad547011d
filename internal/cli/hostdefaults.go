package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"capstan.dev/capstan/internal/atomicfile"
)

// defaultsVariable contains the options of capstand.service.
const defaultsVariable = "CAPSTAND_OPTIONS"

// option is a flag and its value.
type option [2]string

// setDefaults adds options to the file with the options of capstand.service, instead of those of a former join. It calls record before.
func setDefaults(path string, former, options []option, record func(before string, exists bool) error) error {
	before, others, err := otherDefaults(path, former, options)
	exists := !errors.Is(err, fs.ErrNotExist)
	if err != nil && exists {
		return err
	}
	if err := record(others, exists); err != nil {
		return err
	}
	return replaceDefaults(path, before, withOptions(others, options))
}

// otherDefaults returns the content of the file, and the content without the options of a former join that end. The administrator's own
// options stay, so an option with another value is an error.
func otherDefaults(path string, former, options []option) (before, others string, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", "", err
	}
	ended := slices.DeleteFunc(slices.Clone(former), func(o option) bool { return slices.Contains(options, o) })
	others = withoutOptions(string(data), ended)
	for _, o := range options {
		if value, has := optionValue(others, o[0]); has && value != o[1] {
			return "", "", coded{fmt.Errorf("expected %s %s, or no %s, in %s, found %s %s: run the command again with %s %s, or remove the option from the file",
				o[0], o[1], o[0], path, o[0], value, o[0], value), exitUsage}
		}
	}
	return string(data), others, nil
}

// unsetDefaults removes options from the file. made: the file was made for them, and is removed when it has no others.
func unsetDefaults(path string, options []option, made bool) error {
	before, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	after := withoutOptions(string(before), options)
	if made && after == defaultsVariable+"=\"\"\n" {
		return os.Remove(path)
	}
	return replaceDefaults(path, string(before), after)
}

// replaceDefaults keeps the permissions of an existing file, and a link to it.
func replaceDefaults(path, before, after string) error {
	if after == before {
		return nil
	}
	mode := fs.FileMode(0o644)
	if file, err := filepath.EvalSymlinks(path); err == nil {
		info, err := os.Stat(file)
		if err != nil {
			return err
		}
		path, mode = file, info.Mode().Perm()
	}
	return atomicfile.WriteFile(path, []byte(after), mode)
}

// optionWords returns the lines of the file, the number of the one with the options or -1, and the options.
func optionWords(content string) (lines []string, at int, words []string) {
	lines = strings.Split(strings.TrimSuffix(content, "\n"), "\n")
	at = -1
	for i, line := range lines {
		if strings.HasPrefix(line, defaultsVariable+"=") { // systemd takes the last one.
			at = i
		}
	}
	if at >= 0 {
		for strings.HasSuffix(lines[at], `\`) { // systemd reads the next line as a part of this one.
			next := lines[at+1 : min(at+2, len(lines))]
			lines[at] = strings.TrimSuffix(lines[at], `\`) + strings.Join(next, "")
			lines = slices.Delete(lines, at+1, at+1+len(next))
		}
		words = strings.Fields(strings.Trim(strings.TrimPrefix(lines[at], defaultsVariable+"="), `"'`))
	}
	return lines, at, words
}

// optionValue returns the value that a flag has in the file: that of its last use.
func optionValue(content, flag string) (value string, has bool) {
	_, _, words := optionWords(content)
	for i, word := range words {
		if after, ok := strings.CutPrefix(word, flag+"="); ok {
			value, has = after, true
		} else if word == flag {
			value, has = strings.Join(words[i+1:min(i+2, len(words))], ""), true
		}
	}
	return value, has
}

// missingOptions returns the options whose flags the file does not have.
func missingOptions(content string, options []option) (out []option) {
	for _, o := range options {
		if _, has := optionValue(content, o[0]); !has {
			out = append(out, o)
		}
	}
	return out
}

// withOptions returns the content of the file with the options that it does not have. All other lines stay.
func withOptions(content string, options []option) string {
	lines, at, words := optionWords(content)
	if at < 0 {
		if lines = append(lines, ""); lines[0] == "" {
			lines = lines[1:]
		}
		at = len(lines) - 1
	}
	lines[at] = optionLine(append(words, arguments(missingOptions(content, options))...))
	return strings.Join(lines, "\n") + "\n"
}

// withoutOptions returns the content of the file without options that have these values. All other options and lines stay.
func withoutOptions(content string, options []option) string {
	lines, at, words := optionWords(content)
	if at < 0 {
		return content
	}
	var kept []string
	for i := 0; i < len(words); i++ {
		if i+1 < len(words) && slices.Contains(options, option{words[i], words[i+1]}) {
			i++
			continue
		}
		kept = append(kept, words[i])
	}
	if len(kept) == len(words) {
		return content
	}
	lines[at] = optionLine(kept)
	return strings.Join(lines, "\n") + "\n"
}

func arguments(options []option) (words []string) {
	for _, o := range options {
		words = append(words, o[0], o[1])
	}
	return words
}

func optionLine(words []string) string {
	return fmt.Sprintf("%s=%q", defaultsVariable, strings.Join(words, " "))
}
