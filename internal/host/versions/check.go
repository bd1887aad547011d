package versions

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// runLimit bounds the time for the answer of a program.
const runLimit = time.Minute

// versionArguments are the arguments with which programs print their version.
var versionArguments = map[string][]string{"kubectl": {"version", "--client"}, "etcdctl": {"version"}, "etcdutl": {"version"}}

// machines of ELF, by architecture of Go.
var elfMachines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// check checks that the folder contains complete programs of one version for this host, and returns the version.
func check(ctx context.Context, dir, version string) (string, error) {
	if absent := missing(dir, WorkerPrograms); len(absent) > 0 {
		return "", fmt.Errorf("expected %s, found no %s: give a source that contains them", strings.Join(WorkerPrograms, ", "), strings.Join(absent, ", "))
	}
	absent := missing(dir, ControlPlanePrograms)
	for _, name := range slices.Concat(WorkerPrograms, ControlPlanePrograms) {
		if slices.Contains(absent, name) {
			continue
		}
		path := filepath.Join(dir, name)
		if err := checkFile(path); err != nil {
			return "", fmt.Errorf("%s: %w", name, err)
		}
		found, err := versionOf(ctx, path)
		if err != nil {
			return "", fmt.Errorf("%s: %w", name, err)
		}
		if strings.HasPrefix(name, "etcd") {
			continue // etcd has versions of its own.
		}
		if version == "" {
			version = found
		}
		if found != version || !Valid(found) {
			return "", fmt.Errorf("expected programs of one version, here %s, found that %s prints the version %q", version, name, found)
		}
	}
	return version, nil
}

// checkFile checks that a program can run here.
func checkFile(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
		return fmt.Errorf("expected an executable file, found %s", info.Mode())
	}
	file, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("expected a Linux program (ELF): %w", err)
	}
	machine := file.Machine
	if err := file.Close(); err != nil {
		return err
	}
	if machine != elfMachines[runtime.GOARCH] {
		return fmt.Errorf("expected a program for %s, found one for %s", runtime.GOARCH, machine)
	}
	return nil
}

// versionOf runs a program, and returns the version that it prints: the last word of its first line.
func versionOf(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, runLimit)
	defer cancel()
	arguments, found := versionArguments[filepath.Base(path)]
	if !found {
		arguments = []string{"--version"}
	}
	command := exec.CommandContext(ctx, path, arguments...)
	command.Env, command.Dir, command.WaitDelay = []string{"HOME=/nonexistent"}, "/", time.Second
	var stderr bytes.Buffer
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		return "", fmt.Errorf("expected that it prints its version with %q: %w", strings.Join(arguments, " "), errors.Join(err, firstLine(stderr.String())))
	}
	line, _, _ := strings.Cut(string(out), "\n")
	words := strings.Fields(line)
	if len(words) == 0 {
		return "", errors.New("expected that it prints its version, found nothing")
	}
	return words[len(words)-1], nil
}

// firstLine is the first line of an output as an error, bounded; nil if it is empty.
func firstLine(output string) error {
	line, _, _ := strings.Cut(strings.TrimSpace(output), "\n")
	if line == "" {
		return nil
	}
	return errors.New(line[:min(len(line), 200)])
}
