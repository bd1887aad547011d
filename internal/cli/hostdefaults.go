package cli

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"k8s.io/client-go/util/cert"

	"capstan.dev/capstan/internal/atomicfile"
)

// defaultsVariable contains the options of capstand.service.
const defaultsVariable = "CAPSTAND_OPTIONS"

// setDefaults adds options, as pairs of a flag and a value, to the file with the options of capstand.service.
func setDefaults(path string, options []string) error {
	before, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	after := withOptions(string(before), options)
	if after == string(before) {
		return nil
	}
	return atomicfile.WriteFile(path, []byte(after), 0o644)
}

// withOptions returns the content of the file with the options. An option that the file has keeps its value. All other lines
// stay.
func withOptions(content string, options []string) string {
	lines := strings.Split(strings.TrimSuffix(content, "\n"), "\n")
	at := slices.IndexFunc(lines, func(line string) bool { return strings.HasPrefix(line, defaultsVariable+"=") })
	if at < 0 {
		if lines = append(lines, defaultsVariable+`=""`); lines[0] == "" {
			lines = lines[1:]
		}
		at = len(lines) - 1
	}
	value := strings.Trim(strings.TrimPrefix(lines[at], defaultsVariable+"="), `"'`)
	words := strings.Fields(value)
	for i := 0; i+1 < len(options); i += 2 {
		has := func(word string) bool { return word == options[i] || strings.HasPrefix(word, options[i]+"=") }
		if !slices.ContainsFunc(words, has) {
			words = append(words, options[i], options[i+1])
		}
	}
	lines[at] = fmt.Sprintf("%s=%q", defaultsVariable, strings.Join(words, " "))
	return strings.Join(lines, "\n") + "\n"
}

// splitChain returns the certificate of a host and that of its authority, after a check of the signature.
func splitChain(data []byte) (leaf, authority *x509.Certificate, err error) {
	chain, err := cert.ParseCertsPEM(data)
	if err != nil || len(chain) != 2 {
		return nil, nil, fmt.Errorf("wanted the certificates of this host and of its authority, found %d: the signer %w", len(chain), errForeignSigner)
	}
	if err := chain[0].CheckSignatureFrom(chain[1]); err != nil {
		return nil, nil, err
	}
	return chain[0], chain[1], nil
}

var errForeignSigner = errors.New("is not of Capstan's infrastructure provider")
