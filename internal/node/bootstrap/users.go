package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"capstan.dev/capstan/internal/foreignfile"
	"capstan.dev/capstan/internal/node/cloudconfig"
)

// makeUser creates a user account with the system's tools. An existing account is kept and gets the password, keys and
// sudo rules.
func (r *Runner) makeUser(ctx context.Context, u cloudconfig.User) error {
	if err := r.makeAccount(ctx, u); err != nil {
		return err
	}
	if u.Passwd != "" {
		// The hash goes through a pipe, because all users can read arguments.
		if err := r.run(ctx, u.Name+":"+u.Passwd+"\n", "chpasswd", "-e"); err != nil {
			return err
		}
	}
	if u.LockPasswd == nil || *u.LockPasswd {
		if err := r.run(ctx, "", "usermod", "--lock", u.Name); err != nil {
			return err
		}
	}
	if len(u.Sudo) > 0 {
		if err := r.writeSudo(u); err != nil {
			return err
		}
	}
	if len(u.SSHAuthorizedKeys) > 0 {
		return r.writeKeys(u)
	}
	return nil
}

// makeAccount makes the account with its groups, unless it exists. useradd writes the account before its groups, so one that was killed is
// completed.
func (r *Runner) makeAccount(ctx context.Context, u cloudconfig.User) error {
	account, err := user.Lookup(u.Name)
	command := append([]string{"useradd"}, useraddArgs(u)...)
	if err == nil {
		if !slices.Contains(r.record.Accounts, u.Name) {
			return nil
		}
		if _, err := user.LookupGroupId(account.Gid); err != nil { // The next new group would get its number.
			if err := r.run(ctx, "", "groupadd", "--gid", account.Gid, u.Name); err != nil {
				return err
			}
		}
		if len(groups(u)) == 0 {
			return nil
		}
		command = []string{"usermod", "--append", "--groups=" + strings.Join(groups(u), ","), u.Name}
	} else if !slices.Contains(r.record.Accounts, u.Name) {
		r.record.Accounts = append(r.record.Accounts, u.Name)
		if err := r.save(); err != nil {
			return err
		}
	}
	for _, args := range append(groupaddArgs(u, func(name string) bool { _, err := user.LookupGroup(name); return err == nil }), command) {
		if err := r.run(ctx, "", args...); err != nil {
			return err
		}
	}
	return nil
}

// groupaddArgs returns the commands that create the missing groups of an account, as cloud-init does.
func groupaddArgs(u cloudconfig.User, exists func(string) bool) [][]string {
	var out [][]string
	for _, name := range append(groups(u), u.PrimaryGroup) {
		if name != "" && !exists(name) {
			out = append(out, []string{"groupadd", "--force", name})
		}
	}
	return out
}

func groups(u cloudconfig.User) []string {
	return strings.FieldsFunc(strings.Join(u.Groups, ","), func(r rune) bool { return r == ',' || r == ' ' })
}

func useraddArgs(u cloudconfig.User) []string {
	args := []string{"--create-home"}
	if u.PrimaryGroup == "" {
		args = append(args, "--user-group") // not the default without /etc/login.defs
	}
	add := func(flag, value string) {
		if value != "" {
			args = append(args, flag+"="+value)
		}
	}
	add("--comment", u.Gecos)
	add("--groups", strings.Join(groups(u), ","))
	add("--home-dir", u.HomeDir)
	add("--inactive", u.Inactive)
	add("--shell", u.Shell)
	add("--gid", u.PrimaryGroup)
	return append(args, u.Name)
}

func (r *Runner) writeSudo(u cloudconfig.User) error {
	var b strings.Builder
	for _, rule := range u.Sudo {
		fmt.Fprintf(&b, "%s %s\n", u.Name, rule)
	}
	path := "/etc/sudoers.d/90-capstan-" + u.Name
	if err := os.MkdirAll(filepath.Join(r.Root, filepath.Dir(path)), 0o750); err != nil {
		return err
	}
	return ReplaceFile(r.Root, path, []byte(b.String()), 0o440, 0, 0)
}

func (r *Runner) writeKeys(u cloudconfig.User) error {
	account, err := user.Lookup(u.Name)
	if err != nil {
		return err
	}
	uid, _ := strconv.Atoi(account.Uid)
	gid, _ := strconv.Atoi(account.Gid)
	if err := ensureHome(r.Root, account.HomeDir, uid, gid); err != nil {
		return err
	}
	dir := filepath.Join(account.HomeDir, ".ssh")
	if err := ensureOwned(r.Root, dir, uid, gid); err != nil {
		return err
	}
	keys := strings.Join(u.SSHAuthorizedKeys, "\n") + "\n"
	return ReplaceFile(r.Root, filepath.Join(dir, "authorized_keys"), []byte(keys), 0o600, uid, gid)
}

// ensureOwned gives a user a folder of the own home, and creates it if it is missing. The home can be a folder of the host, to which users of
// other machines can write.
func ensureOwned(root, path string, uid, gid int) error {
	parent, name, err := foreignfile.Parent(root, path)
	if err != nil {
		return err
	}
	defer func() { _ = parent.Close() }()
	if err := parent.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	folder, err := parent.OpenRoot(name + "/.")
	if err != nil {
		return err
	}
	defer func() { _ = folder.Close() }()
	return folder.Chown(".", uid, gid)
}

// ensureHome creates a missing home folder: useradd may have been killed before it did. The folder appears with its owner. The folder above
// it can be one of the host as well.
func ensureHome(root, home string, uid, gid int) error {
	if _, err := os.Stat(filepath.Join(root, home)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent, name, err := foreignfile.MakeParent(root, home)
	if err != nil {
		return err
	}
	defer func() { _ = parent.Close() }()
	unfinished := ".capstan-" + name
	if err := foreignfile.Mkdir(parent, unfinished, uid, gid); err != nil {
		return err
	}
	return parent.Rename(unfinished, name)
}

// run runs a system tool with the given standard input.
func (r *Runner) run(ctx context.Context, input string, args ...string) error {
	out, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer out.Close()
	// The input fits into the pipe's buffer.
	_, err = in.WriteString(input)
	_ = in.Close()
	if err != nil {
		return err
	}
	log, err := os.OpenFile(r.LogPath, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = out, log, log
	exit, err := r.Starter.Start(cmd)
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		_ = cmd.Process.Kill()
		return ctx.Err()
	case e := <-exit:
		if err := e.Err(); err != nil {
			return fmt.Errorf("%s: %w; see %s", args[0], err, r.LogPath)
		}
		return nil
	}
}
