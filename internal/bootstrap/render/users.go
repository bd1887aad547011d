package render

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// user is an entry of users in a cloud-config.
type user struct {
	Name              string   `json:"name"`
	Gecos             string   `json:"gecos,omitempty"`
	PrimaryGroup      string   `json:"primary_group,omitempty"`
	Groups            []string `json:"groups,omitempty"`
	HomeDir           string   `json:"homedir,omitempty"`
	Shell             string   `json:"shell,omitempty"`
	Passwd            string   `json:"passwd,omitempty"`
	LockPasswd        *bool    `json:"lock_passwd,omitempty"`
	Sudo              string   `json:"sudo,omitempty"`
	SSHAuthorizedKeys []string `json:"ssh_authorized_keys,omitempty"`
}

// hashPattern is the form of crypt(5): an id of the algorithm, and its parts.
var hashPattern = regexp.MustCompile(`^\$[0-9a-z]{1,8}\$[A-Za-z0-9./$=,+-]{8,384}$`)

// users returns the accounts of the machine. Errors never quote the hash of a password.
func users(in Input) ([]user, error) {
	var out []user
	for _, u := range in.Spec.Users {
		entry := user{
			Name: u.Name, Gecos: u.Gecos, PrimaryGroup: u.PrimaryGroup, Groups: u.Groups, HomeDir: u.HomeDir, Shell: u.Shell,
			LockPasswd: u.LockPassword, Sudo: u.Sudo, SSHAuthorizedKeys: u.SSHAuthorizedKeys,
		}
		if ref := u.PasswdFrom.Secret; ref.Name != "" {
			entry.Passwd = strings.TrimSuffix(string(in.Secrets[ref]), "\n")
			if !hashPattern.MatchString(entry.Passwd) {
				return nil, fmt.Errorf("spec.users[%s].passwdFrom: the key %s of the Secret %s is no hash of a password: expected one line as in /etc/shadow, for example of `openssl passwd -6`", u.Name, ref.Key, ref.Name)
			}
		}
		out = append(out, entry)
	}
	return out, nil
}

// ownerOfUsers reports whether the owner of a file is an account or a group that the machine creates.
func ownerOfUsers(owner string, users []bootstrapv1.User) bool {
	name, group, _ := strings.Cut(owner, ":")
	return slices.ContainsFunc(users, func(u bootstrapv1.User) bool {
		return u.Name == name || u.Name == group || group != "" && (u.PrimaryGroup == group || slices.Contains(u.Groups, group))
	})
}
