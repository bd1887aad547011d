//go:build linux

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/foreignfile"
)

// boxFlags are the flags that select an installation of this box.
func (a *app) boxFlags(f *pflag.FlagSet) {
	f.StringVar(&a.root, "root", embedded.DefaultRoot, "folder with the state of the installation; each folder is a separate installation")
	f.StringVar(&a.assets, "assets", "", "folder with the binaries (default: the folder of this program)")
}

// boxHostCommands are the commands of `capstan host` that work on this box.
func (a *app) boxHostCommands() []*cobra.Command {
	return []*cobra.Command{a.hostJoinCommand(), a.hostLeaveCommand(), a.hostVersionsCommand()}
}

// localServer is the URL under which other boxes reach the management API of this box, or "".
func (a *app) localServer() string {
	state, err := embedded.LoadState(a.layout())
	if err != nil || state.APIAddress == "" {
		return ""
	}
	return "https://" + state.APIAddress
}

// boxCommands are the commands that work on this box and not through the API of a management cluster.
func (a *app) boxCommands() []*cobra.Command {
	return []*cobra.Command{
		a.upCommand(), a.downCommand(), a.planeCommand(), a.backupCommand(), a.restoreCommand(), a.doctorCommand(),
		a.quickstartCommand(),
	}
}

func (a *app) layout() embedded.Layout { return embedded.Layout{Root: a.root} }

// waits reports that the command waits for another one.
func (a *app) waits(holder string) { a.step("wait for %s, which works on %s", holder, a.root) }

// rootFlag returns the flag that selects the installation; "" for the default.
func (a *app) rootFlag() string {
	if a.root == "" || a.isDefaultRoot() {
		return ""
	}
	return " --root " + a.root
}

// isDefaultRoot returns whether the root folder is the default, which can be a link to another folder.
func (a *app) isDefaultRoot() bool {
	root := embedded.DefaultRoot
	return withoutLinks(&root) == nil && a.root == root
}

func (a *app) assetsDir() (embedded.Assets, error) {
	dir, err := embedded.AssetsDir(a.assets)
	return embedded.Assets{Dir: dir}, err
}

// localKubeconfig returns the path of the kubeconfig of this box's plane. The error contains the solutions if this process
// cannot read it.
func (a *app) localKubeconfig() (string, error) {
	path := a.layout().AdminKubeconfig()
	_, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrPermission) {
		err = embedded.ErrNotRoot
	} else if err != nil {
		err = a.noPlane(err)
	}
	if err != nil && !a.rootGiven {
		err = coded{fmt.Errorf("%w; or name another management cluster with --kubeconfig or $KUBECONFIG", err), exitCode(err)}
	}
	return path, err
}

// localVersions lists the Kubernetes versions whose programs are on this box.
func (a *app) localVersions() ([]string, error) {
	assets, err := a.assetsDir()
	if err != nil {
		return nil, err
	}
	return embedded.KubernetesVersions(assets)
}

// unitOfPlane is the unit of the packages. It runs the plane in the default root folder.
const unitOfPlane = "capstan.service"

// unit returns the unit of systemd that can run the plane of the root folder; "" for none.
func (a *app) unit() string {
	if _, err := os.Stat(systemdFolder); err != nil || !a.isDefaultRoot() {
		return ""
	}
	return unitOfPlane
}

// boxFiles returns the state of the plane and the ends of its logs, for a support bundle; nothing without a plane.
func (a *app) boxFiles(ctx context.Context) (map[string][]byte, error) {
	files := map[string][]byte{}
	if _, err := embedded.LoadState(a.layout()); errors.Is(err, fs.ErrNotExist) {
		return files, nil
	}
	status, err := embedded.GetStatus(ctx, a.layout())
	if err != nil {
		err = a.noPlane(err)
	} else if files["plane-status.json"], err = json.MarshalIndent(status, "", "  "); err != nil {
		return nil, err
	}
	unit := status.Unit
	if unit == "" && err != nil && a.isDefaultRoot() {
		unit = unitOfPlane // Its log can contain the reason why the plane does not answer.
	}
	journal, journalErr := journalOf(ctx, unit)
	err = errors.Join(err, journalErr)
	if len(journal) > 0 {
		files["logs/plane.journal"] = journal
	}
	for _, pattern := range []string{"logs/*.log", "hosts/*/machines/*/init.log"} {
		paths, globErr := filepath.Glob(filepath.Join(a.root, pattern))
		err = errors.Join(err, globErr)
		for _, path := range paths {
			log, openErr := os.Open(path)
			err = errors.Join(err, a.addLog(files, path, log, openErr))
		}
	}
	machines, globErr := filepath.Glob(filepath.Join(a.root, "hosts/*/machines/*/rootfs"))
	err = errors.Join(err, globErr)
	for _, rootfs := range machines {
		for _, service := range machineServices[1:] { // without PID 1
			path := filepath.Join("var/log/capstan", service+".log")
			log, openErr := foreignfile.Open(rootfs, path)
			err = errors.Join(err, a.addLog(files, filepath.Join(rootfs, path), log, openErr))
		}
	}
	return files, err
}

// journalTimeout bounds the reading of the journal.
const journalTimeout = 20 * time.Second

// journalOf returns the end of the log of a systemd unit; nothing without a unit or without systemd.
func journalOf(ctx context.Context, unit string) ([]byte, error) {
	if unit == "" {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, journalTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "journalctl", "--unit", unit, "--lines", "10000", "--no-pager", "--quiet").Output()
	if errors.Is(err, exec.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		err = fmt.Errorf("journalctl --unit %s: %w", unit, err)
	}
	if skipped := len(out) - maxLog; skipped > 0 {
		_, out, _ = bytes.Cut(out[skipped:], []byte("\n")) // A part of a line could hide a secret.
	}
	return out, err
}

// addLog adds the end of an opened log, and closes it. A machine that does not run a service has no log of it, and a machine can be deleted
// in the meantime.
func (a *app) addLog(files map[string][]byte, path string, log *os.File, openErr error) error {
	if errors.Is(openErr, fs.ErrNotExist) {
		return nil
	}
	if openErr != nil {
		return openErr
	}
	name, err := filepath.Rel(a.root, path)
	data, readErr := endOf(log, maxLog)
	if err == nil {
		files[name] = data
	}
	return errors.Join(readErr, log.Close())
}
