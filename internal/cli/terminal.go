package cli

import (
	"io"
	"os"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"
)

// printable replaces the characters of a text that control a terminal, except for those to keep: tenants and machines write names, messages and
// logs.
func printable(text, keep string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) || strings.ContainsRune(keep, r) {
			return r
		}
		return ' '
	}, text)
}

// forTerminal returns a writer of printable text if the file is a terminal, and the file otherwise: other programs get each byte.
func forTerminal(file *os.File) io.Writer {
	if term.IsTerminal(int(file.Fd())) {
		return &printableWriter{to: file}
	}
	return file
}

// printableWriter writes printable text with line breaks and tabs.
type printableWriter struct {
	to io.Writer

	mu sync.Mutex
	// part is the beginning of a character.
	part []byte
}

// Write implements io.Writer.
func (w *printableWriter) Write(data []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := append(w.part, data...)
	whole := len(text)
	for start := whole - 1; start >= 0 && start > whole-utf8.UTFMax; start-- {
		if utf8.RuneStart(text[start]) {
			if !utf8.FullRune(text[start:]) {
				whole = start
			}
			break
		}
	}
	w.part = append([]byte(nil), text[whole:]...)
	if _, err := io.WriteString(w.to, printable(string(text[:whole]), "\n\t")); err != nil {
		return 0, err
	}
	return len(data), nil
}
