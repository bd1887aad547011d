package machineimage

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// shell is a program that an image must contain at this place: the commands of the bootstrap data run in it.
const shell = "bin/sh"

// programs that an image must contain in one of the searched folders, with their packages of Debian. Those of Capstan and of
// Kubernetes need no libraries: they are static, and machines get them from the host.
var programs = []struct{ name, apt, purpose string }{
	{"mount", "mount", "the kubelet mounts volumes with it"},
	{"umount", "mount", "the kubelet unmounts volumes with it"},
	{"nft", "nftables", "the service proxy and the network plugin set their rules with it"},
	{"conntrack", "conntrack", "the service proxy clears stale connections with it"},
}

// searched are the folders of programs, as in PATH of a machine.
var searched = []string{"usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin"}

// Check returns the first reason why machines cannot use a root file system.
func Check(dir string) error {
	if info, err := os.Lstat(filepath.Join(dir, "usr")); err != nil || !info.IsDir() {
		return errors.New("expected a root file system with the folder usr, found none")
	}
	if err := checkShell(dir); err != nil {
		return err
	}
	for _, p := range programs {
		file, where, err := findProgram(dir, p.name)
		if err != nil {
			return fmt.Errorf("expected the program %s, found none in %s: add the package %s of Debian or its like (%s)", p.name, strings.Join(searched, ", "), p.apt, p.purpose)
		}
		err = checkProgram(dir, file)
		_ = file.Close()
		if err != nil {
			return fmt.Errorf("program %s: %w", where, err)
		}
	}
	return nil
}

func checkShell(dir string) error {
	file, err := Open(dir, shell)
	if err != nil {
		return fmt.Errorf("expected a shell in /%s, found none: add the package dash of Debian or its like, and the link bin to usr/bin (the commands of the bootstrap data run in it)", shell)
	}
	defer func() { _ = file.Close() }()
	if err := checkProgram(dir, file); err != nil {
		return fmt.Errorf("program %s: %w", shell, err)
	}
	return nil
}

// findProgram opens a program of a root file system.
func findProgram(dir, name string) (*os.File, string, error) {
	for _, folder := range searched {
		where := path.Join(folder, name)
		file, err := Open(dir, where)
		if err != nil {
			continue
		}
		if info, err := file.Stat(); err == nil && info.Mode()&0o111 != 0 {
			return file, where, nil
		}
		_ = file.Close()
	}
	return nil, "", fs.ErrNotExist
}

var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// checkProgram returns an error if the program is for another processor, or if a library of it is missing. Scripts pass.
func checkProgram(dir string, file *os.File) error {
	magic := make([]byte, len(elf.ELFMAG))
	if _, err := file.ReadAt(magic, 0); err != nil || string(magic) != elf.ELFMAG {
		return nil
	}
	program, err := elf.NewFile(file)
	if err != nil {
		return err
	}
	if want := machines[runtime.GOARCH]; program.Machine != want {
		return fmt.Errorf("expected a program for %v, found one for %v", want, program.Machine)
	}
	if err := checkInterpreter(dir, program); err != nil {
		return err
	}
	if own, err := program.DynString(elf.DT_RUNPATH); err == nil && len(own) > 0 {
		return nil // Its libraries are in folders of its own.
	}
	libraries, err := program.ImportedLibraries()
	if err != nil {
		return nil //nolint:nilerr // a static program
	}
	for _, name := range libraries {
		if !hasLibrary(dir, name) {
			return fmt.Errorf("expected the library %s, found none in usr/lib and lib", name)
		}
	}
	return nil
}

// checkInterpreter returns an error if the dynamic linker of a program is missing.
func checkInterpreter(dir string, program *elf.File) error {
	for _, p := range program.Progs {
		if p.Type != elf.PT_INTERP || p.Filesz > unix.PathMax {
			continue
		}
		name := make([]byte, p.Filesz)
		if _, err := p.ReadAt(name, 0); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		linker := strings.TrimRight(string(name), "\x00")
		file, err := Open(dir, linker)
		if err != nil {
			return fmt.Errorf("expected its dynamic linker %s, found none", linker)
		}
		_ = file.Close()
	}
	return nil
}

// hasLibrary looks into the usual folders.
func hasLibrary(dir, name string) bool {
	triplet := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[runtime.GOARCH]
	for _, folder := range []string{"usr/lib", "lib", "usr/lib64", "lib64", "usr/local/lib", "usr/lib/" + triplet, "lib/" + triplet} {
		if file, err := Open(dir, path.Join(folder, path.Base(name))); err == nil {
			_ = file.Close()
			return true
		}
	}
	return false
}

// Open opens a regular file of a root file system for reading. Links, absolute ones too, stay in dir as in a chroot(2).
func Open(dir, name string) (*os.File, error) {
	file, err := open(dir, name)
	if err != nil {
		return nil, err
	}
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		_ = file.Close()
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
	}
	return file, nil
}

func open(dir, name string) (*os.File, error) {
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	defer func() { _ = unix.Close(root) }()
	how := &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	fd, err := unix.Openat2(root, name, how)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// maxRead bounds ReadFile.
const maxRead = 4 << 20

// ReadFile returns the content of a file of a root file system, with at most 4 MiB. Files of the host do not need openat2(2).
func ReadFile(dir, name string) ([]byte, error) {
	if dir == "/" {
		return os.ReadFile(filepath.Join(dir, name))
	}
	file, err := Open(dir, name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	data, err := io.ReadAll(io.LimitReader(file, maxRead+1))
	if err == nil && len(data) > maxRead {
		err = &fs.PathError{Op: "read", Path: name, Err: unix.EFBIG}
	}
	return data, err
}
